"""bench coexec_kills: two small jobs share a fleet, again and again, while drivers, workers, agents
and the control plane are killed at random.

Each job's curve is compared, to the bit, with that of the same job alone on the same service,
undisturbed. A run says what was killed and when; the same seed kills the same things at the same
points of the jobs' progress. After every run no process of its jobs may live, and after every
service nothing of it: no process, no port, no shared memory, no file outside its own folders.
"""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.options import BenchOptions
from harness.killed_service import KilledService
from slackwater.model.errors import UnavailableError
from slackwater.zoo.tiny import make_model

_STEPS = 3
_RUNS_A_SERVICE = 10
_RUN_LIMIT_S = 600.0  # only a run that hangs takes so long, however busy the machine is
_VICTIMS = ("driver", "keeper", "engine", "trainer", "agent", "plane")
_OVER = ("finished", "failed", "stopped", "refused")
_RECIPES = {"digits": "copy-digits", "sums": "arithmetic"}


@dataclass(frozen=True, slots=True)
class Kill:
    """Once so many iterations of both jobs are done, and so many seconds later."""

    after: int
    delay_s: float
    victim: str
    job: str


@dataclass(slots=True)
class Found:
    """What all runs showed. `others_differ`: of jobs none of whose own processes was killed."""

    runs: int = 0
    updates: float = 0.0  # that the undisturbed jobs made: there is something to compare
    others_differ: int = 0
    hit_differ: int = 0
    lost: int = 0
    orphans: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)


def kills_of(seed: int) -> list[Kill]:
    """One or two, of different kinds."""
    draw = random.Random(seed)
    victims = draw.sample(_VICTIMS, draw.choice((1, 1, 2)))
    return sorted(
        (
            Kill(draw.randrange(2 * _STEPS - 1), draw.uniform(0.0, 0.4), victim, job)
            for victim in victims
            for job in (draw.choice(list(_RECIPES)),)
        ),
        key=lambda kill: kill.after,
    )


def run(options: BenchOptions) -> dict[str, object]:
    """Fifty runs from the seed on."""
    return measured(range(options.seed, options.seed + (2 if options.quick else 50)), options)


def measured(seeds: Sequence[int], options: BenchOptions) -> dict[str, object]:
    """One run for each seed; a fresh service for every ten."""
    found = Found()
    wanted: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="slackwater-job-kills-") as made:
        make_model("tiny", Path(made) / "model", 0)
        for start in range(0, len(seeds), _RUNS_A_SERVICE):
            service = KilledService(Path(made) / f"service-{start}", Path(made) / "model")
            with service:
                for job in _RECIPES.keys() - wanted.keys():
                    wanted[job] = _alone(service, job)
                    found.updates += sum(row.get("optim/updates", 0.0) for row in wanted[job])
                for seed in seeds[start : start + _RUNS_A_SERVICE]:
                    options.progress(f"run {seed}", found.runs / len(seeds))
                    _disturbed(service, seed, wanted, found)
            found.orphans += service.left_behind()
    return {
        "runs": found.runs,
        "updates_alone": found.updates,
        "kills": dict(found.kills),
        "others_differ": found.others_differ,
        "hit_differ": found.hit_differ,
        "acknowledged_lost": found.lost,
        "unfinished": found.unfinished,
        "orphans": found.orphans,
        "run_s": round(sum(found.took_s) / max(len(found.took_s), 1), 2),
        "longest_run_s": round(max(found.took_s, default=0.0), 2),
    }


def _alone(service: KilledService, job: str) -> list[dict[str, Any]]:
    name = f"{job}-alone"
    service.submit(_job_file(name, job))
    deadline_s = time.monotonic() + _RUN_LIMIT_S
    while service.job(name)["stage"] != "finished":
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"{name}: {service.job(name)}")
        time.sleep(0.05)
    return service.curve(name)


def _disturbed(
    service: KilledService, seed: int, wanted: dict[str, list[dict[str, Any]]], found: Found
) -> None:
    """One run: both jobs, the seed's kills, then what came of it."""
    began_s = time.monotonic()
    names = {job: f"{job}-{seed}" for job in _RECIPES}
    for job, name in names.items():
        service.submit(_job_file(name, job))
    due, hit = kills_of(seed), set[str]()
    rows: dict[str, dict[str, Any]] = {}
    while True:
        if time.monotonic() > began_s + _RUN_LIMIT_S:
            break
        rows = {name: service.job(name) for name in names.values()}
        if all(row["stage"] in _OVER for row in rows.values()):
            break
        done = sum(len(service.curve(name)) for name in names.values())
        if due and done >= due[0].after:
            kill = due[0]
            time.sleep(kill.delay_s)
            if service.kill(kill.victim, names[kill.job]):  # else there is none of it just now
                due.pop(0)
                found.kills[kill.victim] += 1
                if kill.victim in ("driver", "keeper"):
                    hit.add(kill.job)
        time.sleep(0.05)
    found.runs += 1
    found.took_s.append(time.monotonic() - began_s)
    for job, name in names.items():
        curve = service.curve(name)
        steps = [row["step"] for row in curve]
        said = rows[name].get("iteration") or 0
        found.lost += len(set(range(said)) - set(steps)) + (len(steps) - len(set(steps)))
        if rows[name]["stage"] != "finished":
            how = f"{rows[name]['stage']}: {rows[name]['reason']}"
            found.unfinished.append(f"seed {seed}: {name} {how}")
        differ = curve != wanted[job]
        found.hit_differ += differ and job in hit
        found.others_differ += differ and job not in hit
    found.orphans += service.drivers_left(names.values())


def _job_file(name: str, job: str) -> dict[str, Any]:
    """A few iterations of a few tokens, each with an update; the profile is known, so that nothing
    waits for one.
    """
    grpo = {"groups": 4, "max_groups": 4, "group_size": 8, "checkpoint_every": 1}
    return {
        "name": name,
        "model": "tiny",
        "recipe": _RECIPES[job],
        "iterations": _STEPS,
        "slo": 20.0,
        "profile": {"rollout_s": 0.3, "train_s": 0.3, "sync_s": 0.1},
        "options": {"warm_up": {"steps": 20}, "grpo": grpo},
    }
