"""Processor time of the control plane's process for a Tinker sample, an OpenAI completion and a
streamed token.

One service with a tiny model and one engine, clients that keep their connections, and with
`--before SRC` the same clients against an older version in turn, round by round: `*_cpu_speedup` is
the median of the rounds' ratios, since a host's speed changes within a run. What the processes
in front of it use, if any, is counted apart (`front_*`). What the control plane takes while nobody
asks is part of every figure, more of it where the engine is slow; `idle_cpu_share` says how much of
a processor that is.
"""

import asyncio
import itertools
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import numpy as np

from benchmarks.options import BenchOptions
from benchmarks.processor_use import FRONT, PLANE, ProcessorUse
from benchmarks.service.streaming import StreamedService
from slackwater.model.errors import UnavailableError

_AT_ONCE = 32
_IDLE_S = 3.0
_TOKENS = {"sample": 16, "completion": 16, "stream": 64}
_TEXT = "What follows from this, in a few words? Think of the numbers that came before, and why."
_PROMPT = [97 + place % 20 for place in range(90)]
_COMPLETION = {"model": "tiny", "prompt": _TEXT, "ignore_eos": True, "temperature": 1.0}

Ask = Callable[[httpx.AsyncClient], Awaitable[None]]


def request_figures(options: BenchOptions) -> dict[str, float]:
    """Microseconds of processor time each, and how often they go into those of `--before`."""
    from slackwater.zoo.tiny import make_model

    rounds, requests = (1, 64) if options.quick else (6, 384)
    with tempfile.TemporaryDirectory(prefix="slackwater-plane-") as folder:
        model = Path(folder) / "tiny"
        make_model("tiny", model, seed=options.seed)
        services = {"": StreamedService(Path(folder) / "now", model, None)}
        try:
            if options.before is not None:
                source = options.before.resolve()
                source = source / "src" if (source / "src").is_dir() else source
                old = StreamedService(Path(folder) / "before", model, source)
                services["before_"] = old
            for service in services.values():
                service.wait()
            return _measure(services, rounds, requests, options)
        finally:
            for service in services.values():
                service.stop()


def _measure(
    services: dict[str, StreamedService], rounds: int, requests: int, options: BenchOptions
) -> dict[str, float]:
    took: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds + 1):  # the first warms up
        in_turn = list(services.items())
        for place, (prefix, service) in enumerate(in_turn[:: -1 if number % 2 else 1]):
            options.progress(f"{prefix}requests", (number + place / 2) / (rounds + 1))
            for what, one in asyncio.run(_round(service, requests)).items():
                if number:
                    took.setdefault(f"{prefix}{what}", []).append(one)
    figures: dict[str, float] = {"requests_each": rounds * requests}
    for name, seen in took.items():
        if name.endswith("idle"):
            figures[f"{name}_cpu_share"] = float(np.median([share for share, _ in seen]))
            continue
        plane_s, front_s = (float(np.median(column)) for column in zip(*seen, strict=True))
        figures[f"{name}_cpu_us"] = 1e6 * plane_s
        if not name.startswith("before_"):
            figures[f"front_{name}_cpu_us"] = 1e6 * front_s
    for what in _TOKENS if len(services) > 1 else ():
        pairs = zip(took[f"before_{what}"], took[what], strict=True)
        ratios = sorted(before_s / now_s for (before_s, _), (now_s, _) in pairs)
        figures[f"{what}_cpu_speedup"] = float(np.median(ratios))
        figures[f"{what}_cpu_speedup_min"], figures[f"{what}_cpu_speedup_max"] = (
            ratios[0],
            ratios[-1],
        )
    return figures


async def _round(service: StreamedService, requests: int) -> dict[str, tuple[float, float]]:
    """Processor seconds of the plane and of front ends, for each sample, completion and token."""
    found: dict[str, tuple[float, float]] = {}
    used = ProcessorUse(service.process.pid)
    headers = {"authorization": f"Bearer {service.key}"}
    limits = httpx.Limits(max_connections=_AT_ONCE)
    async with httpx.AsyncClient(
        base_url=service.url, headers=headers, timeout=300, limits=limits
    ) as client:
        asked: dict[str, Ask] = {"sample": await _sampler(client)}
        asked |= {"completion": _completion, "stream": _stream}
        rested = await _used(used, asyncio.sleep(_IDLE_S))
        found["idle"] = (rested[0] / _IDLE_S, rested[1] / _IDLE_S)
        for what, ask in asked.items():
            count = requests if what != "stream" else requests // 4
            each = count if what != "stream" else count * _TOKENS[what]
            plane_s, front_s = await _used(used, _many(client, ask, count))
            found[what] = (plane_s / each, front_s / each)
    return found


async def _used(used: ProcessorUse, work: Awaitable[None]) -> tuple[float, float]:
    """Processor seconds of the plane and of front ends during the work."""
    before = used.seconds()
    await work
    after = used.seconds()
    plane_s, front_s = (after.get(role, 0.0) - before.get(role, 0.0) for role in (PLANE, FRONT))
    return plane_s, front_s


async def _many(client: httpx.AsyncClient, ask: Ask, requests: int) -> None:
    numbers = iter(range(requests))

    async def some() -> None:
        for _ in numbers:
            await ask(client)

    await asyncio.gather(*(some() for _ in range(_AT_ONCE)))


async def _sampler(client: httpx.AsyncClient) -> Ask:
    """Asks as the SDK does: one request for the sample, and one that waits for its result."""
    session = _answer(await client.post("/api/v1/create_session", json={"tags": [], **_SDK}))
    opened = {"session_id": session["session_id"], "sampling_session_seq_id": 0}
    opened |= {"base_model": "tiny"}
    sampler = _answer(await client.post("/api/v1/create_sampling_session", json=opened))
    numbers = itertools.count(1)
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": _PROMPT}]},
        "num_samples": 1,
        "sampling_params": {"max_tokens": _TOKENS["sample"], "stop": []},
        "sampling_session_id": sampler["sampling_session_id"],
    }

    async def ask(client: httpx.AsyncClient) -> None:
        sent = await client.post("/api/v1/asample", json={**body, "seq_id": next(numbers)})
        wanted = {"request_id": _answer(sent)["request_id"]}
        got = await client.post("/api/v1/retrieve_future", json=wanted)
        while got.status_code == 408:
            got = await client.post("/api/v1/retrieve_future", json=wanted)
        _check(got)

    return ask


_SDK = {"sdk_version": "0"}


async def _completion(client: httpx.AsyncClient) -> None:
    body = {**_COMPLETION, "max_tokens": _TOKENS["completion"]}
    _check(await client.post("/v1/completions", json=body))


async def _stream(client: httpx.AsyncClient) -> None:
    body = {**_COMPLETION, "max_tokens": _TOKENS["stream"], "stream": True}
    got = await client.post("/v1/completions", json=body)
    _check(got)
    if not got.text.rstrip().endswith("[DONE]"):
        raise UnavailableError("a stream ended early")


def _answer(got: httpx.Response) -> dict[str, str]:
    _check(got)
    found: dict[str, str] = json.loads(got.content)
    return found


def _check(got: httpx.Response) -> None:
    if got.status_code != 200:
        raise UnavailableError(f"the service answered {got.status_code}: {got.text[:200]}")
