"""Tokens a core takes in from a large fleet: 200 engines with 64 turns each. Each engine sends one
frame a step, 12 steps a second, so that every frame arrives alone; turns end at random, and others
take their places.

The receiver is the service's own way, as in `fanin.py`, and collects garbage as the service does.
Beside it streams of server-sent events at the same pace, one event a token, that end at random too.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic, process_time
from typing import Any

import aiohttp
import uvloop

from benchmarks.options import BenchOptions
from benchmarks.rollout.paced_engines import BASE_MODEL, LOGPROB, length_of, token_at
from benchmarks.rollout.senders import StreamedTurn, sender, stream_server
from harness.rollout_floor import RolloutFloor
from slackwater.model.ids import JobId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.runtime.services.garbage import collect_young_only

STEPS_PER_S = 12.0
LONGEST = 1_400
_STREAMS = 256
_BEGIN_S = 120.0
_BEGUN_TOKENS = 8  # of each turn on average
_PATTERN = [token_at(position) for position in range(LONGEST)]


def scattered_figures(options: BenchOptions) -> dict[str, float]:
    """Medians of three rounds (`--runs`) of each way, alternating; if quick, fewer engines."""
    rounds, engines, slots, seconds = (1, 20, 16, 3.0) if options.quick else (3, 200, 64, 20.0)
    rounds = options.runs or rounds
    collect_young_only()
    ours: list[Rate] = []
    theirs: list[Rate] = []
    for number in range(rounds):
        options.progress("scattered frames", number / rounds)
        ours.append(uvloop.run(_frames(engines, slots, seconds)))
        options.progress("scattered server-sent events", (number + 0.5) / rounds)
        theirs.append(uvloop.run(_sse(seconds / 2)))
        options.partial(f"scattered round {number}", _figures(ours[-1:], theirs[-1:]))
    return {
        **_figures(ours, theirs),
        "scattered_engines": float(engines),
        "scattered_turns": float(engines * slots),
    }


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """Tokens per CPU second of the receiver, and the steps a second that a turn really made."""

    tokens_per_cpu_s: float
    steps_per_s: float


def _figures(ours: Sequence[Rate], theirs: Sequence[Rate]) -> dict[str, float]:
    """Of the median rounds. Below the pace that was asked for, frames came in groups."""
    frames, events = (sorted(each)[len(each) // 2] for each in (ours, theirs))
    return {
        "scattered_tokens_per_cpu_s": frames.tokens_per_cpu_s,
        "scattered_over_sse": frames.tokens_per_cpu_s / events.tokens_per_cpu_s,
        "scattered_sse_tokens_per_cpu_s": events.tokens_per_cpu_s,
        "scattered_steps_per_s": frames.steps_per_s,
        "scattered_sse_steps_per_s": events.steps_per_s,
    }


async def _frames(engines: int, slots: int, seconds: float) -> Rate:
    """Of frames, while all places are taken."""
    module = "benchmarks.rollout.paced_engines"
    async with RolloutFloor() as floor:
        arguments = (floor.connect, engines, slots, STEPS_PER_S, LONGEST)
        async with sender(module, *arguments, secret=floor.secret):
            async with asyncio.timeout(_BEGIN_S):
                await floor.until_joined(engines)
            floor.rollout.publish("v1", BASE_MODEL)
            counters = floor.manager.state.counters
            numbers = itertools.count(1)
            turns = [_turns(floor, numbers) for _ in range(engines * slots)]
            return await _rate(turns, lambda: counters.accepted_tokens, seconds)


async def _turns(floor: RolloutFloor, numbers: Iterator[int]) -> None:
    """One turn after the other."""
    for number in numbers:
        name = f"turn-{number}"
        of = (TurnId(name), TrajectoryId(name), JobId("fanin"))
        sampling = Sampling(LONGEST, seed=number)
        spec = TurnSpec(*of, [1, 2, 3], sampling, "v1", base_model=BASE_MODEL)
        turn = await floor.generate(spec)
        wanted = _PATTERN[: length_of(number, LONGEST)]
        assert turn.tokens == wanted, f"a token of {name} was lost or changed on its way"


async def _sse(seconds: float) -> Rate:
    """Of streams."""
    received = _Received()
    async with (
        stream_server("paced_sse", _STREAMS, STEPS_PER_S, LONGEST) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        numbers = itertools.count(1)
        streams = [_streams(session, url, numbers, received) for _ in range(_STREAMS)]
        return await _rate(streams, received.count, seconds)


class _Received:
    """Counts the tokens of all streams."""

    def __init__(self) -> None:
        self.live: set[StreamedTurn] = set()
        self.tokens = 0  # of streams that have ended

    def count(self) -> int:
        return self.tokens + sum(len(turn.tokens) for turn in self.live)


async def _streams(
    session: aiohttp.ClientSession, url: str, numbers: Iterator[int], received: _Received
) -> None:
    """One stream after the other."""
    for number in numbers:
        turn = StreamedTurn()
        received.live.add(turn)
        await turn.read(session, url, {"seed": number})
        received.live.remove(turn)
        received.tokens += len(turn.tokens)
        wanted = _PATTERN[: length_of(number, LONGEST)]
        assert turn.tokens == wanted, f"a token of stream {number} was lost or changed"
        assert turn.logprobs == [LOGPROB] * len(wanted)


async def _rate(
    turns: Iterable[Coroutine[Any, Any, None]], count: Callable[[], int], seconds: float
) -> Rate:
    """Of this process, once all of these turns are under way."""
    tasks = [asyncio.create_task(turn) for turn in turns]
    try:
        async with asyncio.timeout(_BEGIN_S):
            while count() < _BEGUN_TOKENS * len(tasks):  # noqa: ASYNC110  (nobody else counts them)
                await asyncio.sleep(0.1)
        began_s, cpu_s, before = monotonic(), process_time(), count()
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        spent_s, tokens = process_time() - cpu_s, count() - before
        steps_per_s = tokens / (monotonic() - began_s) / len(tasks)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()  # whatever it raised
    await asyncio.gather(*tasks, return_exceptions=True)
    return Rate(tokens / spent_s, steps_per_s)
