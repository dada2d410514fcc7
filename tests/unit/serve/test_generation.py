"""What a generation's listener is told: every token once, those that came while nobody looked
together.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

from starlette.types import Message

from slackwater.model.ids import TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import FinishReason
from slackwater.runtime.executors.turn_results import TurnResult, TurnTokens
from slackwater.runtime.services.loop_shares import LoopShares
from slackwater.serve.openai.generation import ChoiceDelta, FinishedChoice, Generation
from slackwater.wire.front import GenerateChoices


def generation(choices: int) -> Generation:
    gateway: Any = SimpleNamespace(loop_shares=LoopShares(1))
    prompts = [b"\1\0\0\0"]
    asked = GenerateChoices(0, "t", "job", "m", "v", True, None, Sampling(4), choices, prompts, [4])
    return Generation(gateway, asked)


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
        told.push(event)
    assert heard(told) == [(0, [1, 2, 3]), (1, [9]), (0, [4]), (1, []), (0, [])]


def test_who_leaves_hears_nothing_more() -> None:
    told = generation(1)
    told.push(piece(0, 1))
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
        told.push(piece(0, 1))
        await asyncio.sleep(0)
        told.push(whole(0))
        async with asyncio.timeout(60):
            return await listening

    assert asyncio.run(scenario()) == [0, 0]
