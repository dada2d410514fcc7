"""What permits lead to, beside gates."""

import asyncio

from slackwater.control.coschedule.phase_commands import PermitGiven
from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase
from slackwater.runtime.bodies.phases import PhaseHands, PhasesBody


def test_a_permit_with_a_switch_has_the_jobs_state_brought_up() -> None:
    hinted: list[JobId] = []

    async def given() -> None:
        hands = PhaseHands(
            lambda event: None,
            lambda job, nodes: None,
            lambda job, reason: None,
            lambda: None,
            hinted.append,
        )
        body = PhasesBody((NodeId("n"),), hands)
        for number, (job, switch) in enumerate((("a", False), ("b", True), ("b", False))):
            permit = (JobId(job), number, Phase.ROLLOUT, 0, (NodeId("n"),))
            assert body.obey(PermitGiven(*permit, switch, False))
        assert body.switches == 1

    asyncio.run(given())
    assert hinted == [JobId("b")]
