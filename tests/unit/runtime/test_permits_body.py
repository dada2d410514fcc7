"""What permits lead to, beside gates."""

import asyncio

from slackwater.control.coschedule.phase_commands import PermitBack, PermitGiven
from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase
from slackwater.runtime.bodies.phases import PhaseHands, PhasesBody

A, B = JobId("a"), JobId("b")


def test_a_permit_with_a_switch_and_the_end_of_training_have_states_brought_up() -> None:
    hinted: list[tuple[list[JobId], list[JobId]]] = []

    async def given() -> None:
        hands = PhaseHands(
            lambda event: None,
            lambda job, nodes: None,
            lambda job, reason: None,
            lambda: None,
            lambda training, rolling: hinted.append((training, rolling)),
        )
        body = PhasesBody((NodeId("n"),), hands)
        for number, (job, phase) in enumerate(((A, Phase.TRAIN), (B, Phase.ROLLOUT))):
            assert body.obey(PermitGiven(job, number, phase, 0, (NodeId("n"),), job == B, False))
        assert body.switches == 1
        assert body.obey(PermitBack(A, 0))
        assert body.obey(PermitBack(B, 1))

    asyncio.run(given())
    assert hinted == [([A], [B]), ([], [B])]
