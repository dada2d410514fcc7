"""Sandboxes, live: what an action costs beside its execution, and what the broker saves a training
step.

Overhead is what the client waits beyond queueing and execution: HTTP, the durable log, the broker,
the wire, and confining and starting the process. bubblewrap sets its sandbox up after it was
started, which would count as execution; so what `true` takes longer in it than as a plain process
is added to its overhead.
"""

import asyncio
import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx

from benchmarks.actions.coding_step import coding_step
from benchmarks.options import BenchOptions
from harness.own_actions import own_actions
from slackwater.rl.actions import ActionClient, ActionOutcome
from slackwater.sandbox.backends.bubblewrap import find_bubblewrap

BACKENDS = ("process", "bubblewrap")
_TURN_GAP_S = 0.6
_PREPARED_FILES, _PREPARED_BYTES, _OPENED = 500, 32 << 10, 20


@dataclass(frozen=True, slots=True)
class Ran:
    """One action as its client saw it."""

    what: str
    waited_s: float
    result: ActionOutcome

    @property
    def overhead_s(self) -> float:
        return self.waited_s - self.result.queued_s - self.result.ran_s


COMMANDS: dict[str, tuple[str, ...]] = {
    "true": ("true",),
    "write": ("sh", "-c", "echo $$ >> log; wc -l < log"),
    "sleep": ("sleep", "0.05"),
    "search": ("sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do echo $i; done | grep 7"),
    "compute": ("python3", "-S", "-E", "-c", "print(sum(i * i for i in range(20000)))"),
}


def run(options: BenchOptions) -> dict[str, object]:
    trajectories = 30 if options.quick else 200
    figures: dict[str, object] = {
        "trajectories": trajectories,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "bare_spawn_p50_ms": _bare_spawn_ms(),
    }
    present = [name for name in BACKENDS if name != "bubblewrap" or _has_bubblewrap()]
    started_ms: dict[str, float] = {}
    for number, backend in enumerate(present):
        options.progress(f"{trajectories} trajectories, {backend}", number * 0.35)
        ran, health_ms, begun_ms = _measured(backend, trajectories, options.seed)
        started_ms[backend] = median(r.result.ran_s for r in ran if r.what == "true") * 1e3
        own_ms = max(started_ms[backend] - started_ms["process"], 0.0)
        overheads = sorted(r.overhead_s * 1e3 + own_ms for r in ran)
        figures |= {
            f"{backend}_actions": len(ran),
            f"{backend}_done_share": sum(r.result.ok for r in ran) / len(ran),
            f"{backend}_overhead_p50_ms": overheads[len(overheads) // 2],
            f"{backend}_overhead_p90_ms": overheads[int(len(overheads) * 0.9)],
            f"{backend}_launch_p50_ms": median(r.result.usage["launch_s"] for r in ran) * 1e3,
            f"{backend}_own_setup_ms": own_ms,
            f"{backend}_queued_p50_ms": median(r.result.queued_s for r in ran) * 1e3,
            f"{backend}_http_round_trip_p50_ms": health_ms,
            f"{backend}_open_empty_p50_ms": begun_ms["empty"],
            f"{backend}_open_from_snapshot_p50_ms": begun_ms["snapshot"],
        }
    options.progress("the coding recipe", 0.7)
    return figures | coding_step(options)


def _has_bubblewrap() -> bool:
    return find_bubblewrap(None)[0] is not None


def _bare_spawn_ms() -> float:
    """The least that any way to run a program costs here, now."""
    took = []
    for _ in range(50):
        began_s = time.perf_counter()
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        took.append(time.perf_counter() - began_s)
    return median(took) * 1e3


@contextlib.contextmanager
def _service(backend: str) -> Iterator[tuple[str, str]]:
    folder = Path(tempfile.mkdtemp(prefix="slackwater-bench-"))
    places = Path(tempfile.mkdtemp(prefix="slackwater-bench-", dir="/var/tmp"))
    places.chmod(0o711)
    options = ("--sandbox-backend", backend, "--sandbox-folder", str(places))
    try:
        with own_actions(folder, *options) as found:
            yield found
    finally:
        for path in (folder, places):
            shutil.rmtree(path, ignore_errors=True)


def _measured(
    backend: str, trajectories: int, seed: int
) -> tuple[list[Ran], float, dict[str, float]]:
    with _service(backend) as (url, key):
        return asyncio.run(_all(url, key, trajectories, seed))


async def _all(
    url: str, key: str, trajectories: int, seed: int
) -> tuple[list[Ran], float, dict[str, float]]:
    drawn = random.Random(seed)
    over_s = trajectories / 10  # ten begin every second
    async with ActionClient(url, key, job="bench") as client:
        await client.run("true")  # the first start of a lane is not an action's
        plans = [
            (drawn.uniform(0, over_s), drawn.sample(sorted(COMMANDS), 3), drawn.random())
            for _ in range(trajectories)
        ]
        lives = await asyncio.gather(*(_life(client, *plan) for plan in plans))
        begun_ms = await _begun_ms(client)
    return [ran for life in lives for ran in life], await _health_ms(url), begun_ms


async def _life(client: ActionClient, begins_s: float, names: list[str], pace: float) -> list[Ran]:
    """A trajectory: an environment, and a few actions with the model's turns between them."""
    await asyncio.sleep(begins_s)
    found = []
    async with client.environment(memory_mib=64) as place:
        for name in names:
            began_s = time.perf_counter()
            result = await place.run(*COMMANDS[name], kind=name)
            found.append(Ran(name, time.perf_counter() - began_s, result))
            await asyncio.sleep(_TURN_GAP_S * (0.5 + pace))
    return found


async def _begun_ms(client: ActionClient) -> dict[str, float]:
    """How long an environment takes to open, empty and out of a snapshot of 500 files with 16 MiB,
    for whoever asks.
    """
    files = f"for i in $(seq {_PREPARED_FILES}); do head -c {_PREPARED_BYTES} /dev/zero > f$i; done"
    async with client.environment(memory_mib=64) as place:
        made = await place.run("sh", "-c", files)
        assert made.ok, made
        await place.snapshot("prepared")
    found: dict[str, float] = {}
    for name, given in (("empty", {}), ("snapshot", {"snapshot": "prepared"})):
        took = []
        for _ in range(_OPENED):
            began_s = time.perf_counter()
            environment = await client.open(memory_mib=64, **given)
            took.append(time.perf_counter() - began_s)
            await client.close(environment)
        found[name] = median(took) * 1e3
    return found


async def _health_ms(url: str) -> float:
    """What the service takes to answer nothing."""
    took = []
    async with httpx.AsyncClient() as http:
        for _ in range(50):
            began_s = time.perf_counter()
            await http.get(f"{url}/healthz")
            took.append(time.perf_counter() - began_s)
    return median(took) * 1e3
