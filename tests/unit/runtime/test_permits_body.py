"""What permits lead to, beside gates."""

import asyncio

from slackwater.control.coschedule.commands import PermitEnded, PermitGiven
from slackwater.control.fleet.controller import FleetController
from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase
from slackwater.runtime.executors.permits import DecisionClock, PermitExecutor
from slackwater.runtime.live_driver import live_driver, loop_time
from slackwater.timeline.spans import PermitSpans

A, B = JobId("a"), JobId("b")


def _executor(
    hinted: list[tuple[list[JobId], list[JobId]]], saved: list[None] | None = None
) -> PermitExecutor:
    return PermitExecutor(
        live_driver(FleetController()),
        PermitSpans((NodeId("n"),), loop_time()),
        DecisionClock(),
        end_refused_job=lambda job, reason: None,
        save_state=lambda: None if saved is None else saved.append(None),
        prefetch=lambda training, rolling: hinted.append((training, rolling)),
    )


def _given(
    number: int, job: JobId, phase: Phase, *, switch: bool = False, asked: bool = False
) -> PermitGiven:
    return PermitGiven(job, number, phase, 0, (NodeId("n"),), switch, asked)


def test_a_permit_with_a_switch_and_the_end_of_training_have_states_brought_up() -> None:
    hinted: list[tuple[list[JobId], list[JobId]]] = []

    async def given() -> None:
        body = _executor(hinted)
        body.execute(_given(0, A, Phase.TRAIN))
        body.execute(_given(1, B, Phase.ROLLOUT, switch=True))
        assert not hinted  # permits do not wait for it
        await asyncio.sleep(0)
        assert body.switches == 1
        body.execute(PermitEnded(A, 0))
        await asyncio.sleep(0)
        body.execute(PermitEnded(B, 1))
        await asyncio.sleep(0)

    asyncio.run(given())
    assert hinted == [([A], [B]), ([], [B])]


def test_what_follows_from_one_event_is_one_hint() -> None:
    hinted: list[tuple[list[JobId], list[JobId]]] = []

    async def given() -> None:
        body = _executor(hinted)
        body.execute(_given(0, A, Phase.TRAIN, switch=True))
        body.execute(_given(1, B, Phase.ROLLOUT, switch=True))
        await asyncio.sleep(0)

    asyncio.run(given())
    assert hinted == [([A], [B])]


def test_ends_of_iterations_and_asked_permits_are_written_down_inferred_rollouts_not() -> None:
    saved: list[None] = []

    async def given() -> None:
        body = _executor([], saved)
        body.execute(_given(0, A, Phase.ROLLOUT))
        body.execute(PermitEnded(A, 0))
        assert not saved
        body.execute(_given(1, A, Phase.TRAIN))
        body.execute(PermitEnded(A, 1))
        assert len(saved) == 1
        body.execute(_given(2, B, Phase.ROLLOUT, asked=True))
        assert len(saved) == 2
        body.execute(PermitEnded(B, 2))
        assert len(saved) == 3

    asyncio.run(given())
