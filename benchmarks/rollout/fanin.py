"""Tokens a core takes in from 256 turns: our frames up to the manager's books, against a stream per
request.

Ours goes the service's own way: hub, frame codec, rollout body, `RolloutManager.handle`, until the
manager owns every token and gives the turns out whole. Theirs is an aiohttp client with one
server-sent-events stream per turn and one JSON object per token, which appends ids and log-probs to
lists. Both senders are separate processes that send as fast as they are read; the receiver's CPU
time is what counts.
"""

import asyncio
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator

import aiohttp

from benchmarks.options import BenchOptions
from benchmarks.rollout.fanin_source import BASE_MODEL, LOGPROB, SECRET_VARIABLE, token_at
from harness.rollout_floor import RolloutFloor
from slackwater.model.ids import JobId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec

TURNS = 256
CONNECTIONS = 4
_DEADLINE_S = 300.0


def run(options: BenchOptions) -> dict[str, float]:
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


@contextlib.asynccontextmanager
async def _source(*arguments: str, secret: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.rollout.fanin_source",
        *arguments,
        env=os.environ | {SECRET_VARIABLE: secret},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _frames(tokens: int) -> float:
    """Tokens per CPU second, from the first dispatch to the last turn complete."""
    async with asyncio.timeout(_DEADLINE_S), RolloutFloor() as floor:
        counts = (str(TURNS), str(tokens), str(CONNECTIONS))
        async with _source("frames", floor.connect, *counts, secret=floor.secret):
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
    port = 20_000 + secrets.randbelow(12_000)
    async with (
        asyncio.timeout(_DEADLINE_S),
        _source("sse", str(port), str(TURNS), str(tokens)) as source,
    ):
        assert source.stdout is not None
        if not await source.stdout.readline():
            return await _sse(tokens)  # the port was taken
        url = f"http://127.0.0.1:{port}/v1/completions"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            began_s = time.process_time()
            streams = [_one_stream(session, url) for _ in range(TURNS)]
            received = await asyncio.gather(*streams)
            spent_s = time.process_time() - began_s
    wanted = [token_at(position) for position in range(tokens)]
    assert all(got == (wanted, [LOGPROB] * tokens) for got in received)
    return TURNS * tokens / spent_s


async def _one_stream(session: aiohttp.ClientSession, url: str) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    async with session.post(url, json={"stream": True}) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            tokens += choice["token_ids"]
            logprobs += choice["logprobs"]["token_logprobs"]
    return tokens, logprobs
