"""An hour of mixed load on one service: whether memory still grows after ten minutes, and what is
left afterwards.

32 clients of one tenant: Tinker runs that train, sample, save and load, each with a new model every
dozen steps; OpenAI streams, some of which are left in the middle; actions in environments that come
and go, each at a pace of its own (some 16 requests a second in all), so that the load is the same
throughout. `--duration` seconds (an hour), minutes with `--quick`.

`memory_growth_after_10min`: the largest, over the control plane and every worker, of resident
memory at the end over resident memory ten minutes after the start (a sixth of the duration, if that
is less), medians over a minute; without the KV cache, whose bound is `--kv-mb` and whose most is
`kv_cache_mib`. `growth_<process>`: each one's. `left`: processes, files, shared
memory and requests that are still there when the clients have gone and the service was stopped;
`left_what` names them. `curves`: by process (seconds, MiB). A run that is broken off prints what it
has, with the reason in `broke`.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.options import BenchOptions
from benchmarks.soak.clients import Soak, SoakClients
from benchmarks.soak.memory_curves import MemoryCurves
from harness.killed_service import KilledService

_CLIENTS = 32
_SETTLED_S = 600.0
_DEFAULT_S, _QUICK_S = 3600.0, 180.0
_SAMPLE_S = 2.0
_QUIET_S = 60.0  # what was asked for may take so long to end after its clients left
_UP = ("--sandboxes", "1")
# Gauges that are above 0 while anything that a client asked for is unfinished.
_REQUESTS = (
    "waiting_operations",
    "live_turns",
    "actions_waiting",
    "actions_running",
    "environments",
)


def run(options: BenchOptions) -> dict[str, Any]:
    """The whole soak; what there is of it, if it breaks."""
    from slackwater.zoo.tiny import make_model

    duration_s = options.duration_s or (_QUICK_S if options.quick else _DEFAULT_S)
    figures: dict[str, Any] = {"clients": _CLIENTS, "duration_s": duration_s}
    with tempfile.TemporaryDirectory(prefix="slackwater-soak-") as folder:
        make_model("tiny", Path(folder) / "tiny", seed=options.seed)
        service = KilledService(Path(folder) / "service", Path(folder) / "tiny", options=_UP)
        try:
            with service:
                _soak(service, options, duration_s, figures)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001  (what was measured is printed)
            figures["broke"] = f"{type(error).__name__}: {error}"[:500]
        _count_left(figures, service.left_behind())
    return figures


def _soak(
    service: KilledService, options: BenchOptions, duration_s: float, figures: dict[str, Any]
) -> None:
    soak, memory = Soak(service.url, service.key), MemoryCurves(service.pid)
    clients = SoakClients(soak, _CLIENTS, options.seed)
    try:
        with clients:
            while (at_s := time.monotonic() - memory.began_s) < duration_s:
                memory.sample()
                options.progress(f"{soak.done.total()} requests", at_s / duration_s)
                time.sleep(_SAMPLE_S)
    finally:
        figures |= _memory_figures(memory, min(_SETTLED_S, duration_s / 6))
        figures["done"], figures["failed"] = dict(soak.done), dict(soak.failed)
        figures["last_error"] = soak.last_error
    _count_left(figures, [f"client {clients.unfinished()}"] if clients.unfinished() else [])
    _count_left(figures, _requests_left(service))
    memory.sample()
    figures["rested_mib"] = {name: memory.curves[name][-1][1] for name in sorted(memory.living)}


def _memory_figures(memory: MemoryCurves, since_s: float) -> dict[str, Any]:
    growth = memory.growth(since_s)
    return {
        "memory_growth_after_10min": max(growth.values(), default=None),
        "memory_settled_s": since_s,
        "kv_cache_mib": memory.kv_cache_mib,
        **{f"growth_{name}": round(ratio, 4) for name, ratio in growth.items()},
        "curves": {name: curve for name, curve in memory.curves.items() if len(curve) > 10},
    }


def _requests_left(service: KilledService) -> list[str]:
    """Requests and environments that the service still has some time after its clients left."""
    deadline_s = time.monotonic() + _QUIET_S
    while True:
        try:
            gauges = service.get("/slackwater/status")["gauges"]
            held = [f"{name} {gauges[name]:g}" for name in _REQUESTS if gauges.get(name)]
        except httpx.HTTPError as error:
            held = [f"no answer: {error}"]
        if not held or time.monotonic() > deadline_s:
            return held
        time.sleep(0.5)


def _count_left(figures: dict[str, Any], what: list[str]) -> None:
    figures["left_what"] = figures.get("left_what", []) + what
    figures["left"] = len(figures["left_what"])
