"""Tokens a core takes in from 256 turns: our frames up to the manager's books, against a stream per
request.

Ours goes the service's own way: hub, frame codec, rollout body, `RolloutManager.handle`, until the
manager owns every token and gives the turns out whole. Theirs is an aiohttp client with one
server-sent-events stream per turn and one JSON object per token, which appends ids and log-probs to
lists. Both senders are separate processes that send as fast as they are read; the receiver's CPU
time is what counts. `--part scattered` (`scattered.py`): frames and events one at a time, turns
that end at random.
"""

import asyncio
import time

import aiohttp

from benchmarks.options import BenchOptions
from benchmarks.rollout.paced_engines import BASE_MODEL, LOGPROB, token_at
from benchmarks.rollout.scattered import scattered_figures
from benchmarks.rollout.senders import SOURCE, StreamedTurn, sender, stream_server
from harness.rollout_floor import RolloutFloor
from slackwater.model.ids import JobId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec

TURNS = 256
CONNECTIONS = 4
PARTS = ("back_to_back", "scattered")
_DEADLINE_S = 300.0


def run(options: BenchOptions) -> dict[str, float]:
    figures = _back_to_back(options) if options.wants("back_to_back") else {}
    return figures | (scattered_figures(options) if options.wants("scattered") else {})


def _back_to_back(options: BenchOptions) -> dict[str, float]:
    """Three rounds of each way, alternating; the median of each."""
    rounds = 1 if options.quick else 3
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds):
        options.progress("frames", number / rounds)
        ours.append(asyncio.run(_frames(2_000 if options.quick else 8_000)))
        options.progress("server-sent events", (number + 0.5) / rounds)
        theirs.append(asyncio.run(_sse(150 if options.quick else 400)))
    tokens_per_s, sse_per_s = _median(ours), _median(theirs)
    return {
        "over_sse": tokens_per_s / sse_per_s,
        "control_cpu_us_per_token": 1e6 / tokens_per_s,
        "tokens_per_s": tokens_per_s,
        "sse_tokens_per_s": sse_per_s,
        "turns": float(TURNS),
        "connections": float(CONNECTIONS),
    }


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


async def _frames(tokens: int) -> float:
    """Tokens per CPU second, from the first dispatch to the last turn complete."""
    async with asyncio.timeout(_DEADLINE_S), RolloutFloor() as floor:
        arguments = ("frames", floor.connect, TURNS, tokens, CONNECTIONS)
        async with sender(SOURCE, *arguments, secret=floor.secret):
            await floor.until_joined(CONNECTIONS)
            floor.rollout.publish("v1", BASE_MODEL)
            began_s = time.process_time()
            turns = await asyncio.gather(*(floor.generate(_spec(n, tokens)) for n in range(TURNS)))
            spent_s = time.process_time() - began_s
    wanted = [token_at(position) for position in range(tokens)]
    assert all(turn.tokens == wanted for turn in turns), "a token was lost or changed on its way"
    return TURNS * tokens / spent_s


def _spec(number: int, tokens: int) -> TurnSpec:
    name = f"turn-{number}"
    of = (TurnId(name), TrajectoryId(name), JobId("fanin"))
    return TurnSpec(*of, [1, 2, 3], Sampling(tokens), "v1", base_model=BASE_MODEL)


async def _sse(tokens: int) -> float:
    """Tokens per CPU second, from the first request to the end of the last stream."""
    turns = [StreamedTurn() for _ in range(TURNS)]
    async with (
        asyncio.timeout(_DEADLINE_S),
        stream_server("sse", TURNS, tokens) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        began_s = time.process_time()
        await asyncio.gather(*(turn.read(session, url, {"stream": True}) for turn in turns))
        spent_s = time.process_time() - began_s
    wanted = [token_at(position) for position in range(tokens)]
    assert all(turn.tokens == wanted for turn in turns)
    assert all(turn.logprobs == [LOGPROB] * tokens for turn in turns)
    return TURNS * tokens / spent_s
