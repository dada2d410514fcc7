"""What a generation's listener is told: every token once, those that came while nobody looked
together.
"""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from starlette.types import Message

from slackwater.model.ids import JobId, TenantId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import FinishReason
from slackwater.runtime.executors.engines import TurnResult, TurnTokens
from slackwater.runtime.services.loop_shares import LoopShares
from slackwater.runtime.services.turn_shares import TurnShares
from slackwater.serve.openai.generation import (
    ChoiceDelta,
    ChoiceRequest,
    FinishedChoice,
    Generation,
)


class StoppedClock:
    """Stands still until it is started."""

    def __init__(self) -> None:
        self._began_s: float | None = None

    def start(self) -> None:
        self._began_s = time.perf_counter()

    def __call__(self) -> float:
        return 0.0 if self._began_s is None else time.perf_counter() - self._began_s


def generation(choices: int) -> Generation:
    plane: Any = SimpleNamespace(loop_shares=LoopShares(1), broken_engine=lambda *_: None)
    asked: Any = ChoiceRequest([1], None, "m", "v", "job")  # type: ignore[arg-type]  # nothing is submitted
    return Generation(plane, TenantId("t"), [asked] * choices, stream=True)


def piece(choice: int, *tokens: int) -> ChoiceDelta:
    return ChoiceDelta(choice, TurnTokens(TurnId("t"), list(tokens), [-1.0] * len(tokens)))


def whole(choice: int) -> FinishedChoice:
    return FinishedChoice(choice, TurnResult(TurnId("t"), [], [], FinishReason.LENGTH, "v", 0))


async def gone() -> Message:
    return {"type": "http.disconnect"}


def heard(told: Generation) -> list[tuple[int, list[int]]]:
    async def read() -> list[tuple[int, list[int]]]:
        async with asyncio.timeout(60):
            return [
                (event.choice, list(event.more.tokens) if isinstance(event, ChoiceDelta) else [])
                async for event in told.events()
            ]

    return asyncio.run(read())


def test_tokens_that_wait_are_told_together_and_choices_apart() -> None:
    told = generation(2)
    for event in (piece(0, 1), piece(0, 2, 3), piece(1, 9), piece(0, 4), whole(1), whole(0)):
        told.say(event, event.choice)
    assert heard(told) == [(0, [1, 2, 3]), (1, [9]), (0, [4]), (1, []), (0, [])]


def test_who_leaves_hears_nothing_more() -> None:
    told = generation(1)
    told.say(piece(0, 1), 0)
    asyncio.run(told.until_gone(gone))
    assert heard(told) == []
    assert asyncio.run(told.results()) is None


def test_one_that_waits_is_woken() -> None:
    told = generation(1)

    async def scenario() -> list[int]:
        async def listen() -> list[int]:
            return [event.choice async for event in told.events()]

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        told.say(piece(0, 1), 0)
        await asyncio.sleep(0)
        told.say(whole(0), 0)
        async with asyncio.timeout(60):
            return await listening

    assert asyncio.run(scenario()) == [0, 0]


def test_a_thousand_clients_of_a_tenant_that_had_its_share_are_not_let_go_at_once() -> None:
    loud, quiet, stopped = TenantId("loud"), TenantId("quiet"), list[str]()
    most_in_a_round = 0

    async def scenario() -> None:
        nonlocal most_in_a_round
        clock = StoppedClock()
        shares = LoopShares(2, clock=clock)
        background = set[asyncio.Task[None]]()
        plane: Any = SimpleNamespace(
            loop_shares=shares,
            broken_engine=lambda *_: None,
            shares=TurnShares(4096, ["loud", "quiet"]),
            rollout=SimpleNamespace(submit=lambda *_: None, cancel=stopped.append),
            background=SimpleNamespace(
                spawn=lambda work: background.add(asyncio.create_task(work))
            ),
        )
        asked = ChoiceRequest([1], Sampling(1), "m", "v", JobId("job"))
        begun = [Generation(plane, loud, [asked], stream=True) for _ in range(1000)]
        for one in begun:
            await one.begin()
        shares.seen(quiet)
        shares.spent(loud, 0.01)
        for one in begun:
            one.close()
        assert not stopped
        clock.start()
        async with asyncio.timeout(60):
            while len(stopped) < 1000:
                before = len(stopped)
                await asyncio.sleep(0)
                most_in_a_round = max(most_in_a_round, len(stopped) - before)

    asyncio.run(scenario())
    assert len(set(stopped)) == 1000
    assert most_in_a_round <= 20
