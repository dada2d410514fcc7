"""One service that GRPO jobs are run on, alone or together, and what each run came to."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from slackwater.bench.coscheduling.permit_account import Account, account, stretches
from slackwater.bench.processor_use import ProcessorUse, beside_phases
from slackwater.model.errors import UnavailableError
from slackwater.runtime.store.state_directory import StateDirectory

FIRST_STEPS = 3  # profiled, placed, and in step with the others by then
_MODULE = "slackwater.bench.coscheduling.grpo_driver"
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """One iteration of a job: groups, answers each, tokens of each."""

    groups: int
    answers: int
    tokens: int


@dataclass(slots=True)
class JobResult:
    """What one driver wrote."""

    seed: int
    wrote: dict[str, Any]

    @property
    def ended_s(self) -> list[float]:
        """When its steps ended."""
        found: list[float] = self.wrote["ended_s"]
        return found

    def rate(self, from_s: float, to_s: float) -> float:
        """Steps a second between two moments."""
        inside = [at_s for at_s in self.ended_s if from_s <= at_s <= to_s]
        if len(inside) < 2:
            raise UnavailableError(f"job {self.seed}: made too few steps beside the others")
        return (len(inside) - 1) / (inside[-1] - inside[0])

    def differs(self, other: "JobResult") -> int:
        """How many answers and losses are not the same to the bit."""
        found = 0
        for field in ("tokens", "losses"):
            mine, others = self.wrote[field], other.wrote[field]
            found += abs(len(mine) - len(others))
            found += sum(int(a != b) for a, b in zip(mine, others, strict=False))
        return found


@dataclass(slots=True)
class Run:
    """Jobs that ran at the same time. `used` is processor time by role while all of them made steps, per second of that."""

    results: list[JobResult]
    account: Account
    used: dict[str, float]
    state: dict[str, Any]

    def window(self) -> tuple[float, float]:
        """While all of them made steps."""
        from_s = max(result.ended_s[FIRST_STEPS - 1] for result in self.results)
        return from_s, min(result.ended_s[-1] for result in self.results)

    @property
    def beside(self) -> float:
        """Processors used by everybody but the workers that phases run on."""
        return beside_phases(self.used)


class Shop:
    """Runs jobs on one service."""

    def __init__(self, url: str, key: str, folder: Path, shape: Shape, slo: float) -> None:
        self._url, self._key, self._folder = url, key, folder
        self._shape, self._slo = shape, slo
        self._client = httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=60.0)
        server = StateDirectory(folder / "state").read_server()
        assert server is not None
        self._use = ProcessorUse(int(server["pid"]))

    def close(self) -> None:
        self._client.close()

    def run(
        self,
        run: str,
        seeds: Sequence[int],
        steps: int,
        limit_s: float,
        known: Sequence[Run] = (),
    ) -> Run:
        """Jobs with these seeds together; what is `known` of each from a run before is its profile, and without that it is profiled."""
        profiles = [next(iter(one.account.jobs.values())).profile() for one in known]
        drivers = [
            self._start(f"{run}-{seed}", seed, steps, profiles[seed] if profiles else None)
            for seed in seeds
        ]
        pids = tuple(process.pid for process, _ in drivers)
        looks: list[tuple[float, dict[str, float]]] = []
        deadline_s = time.monotonic() + limit_s
        try:
            while any(process.poll() is None for process, _ in drivers):
                if time.monotonic() > deadline_s:
                    stood = [
                        (row["job"], row["stage"], row["reason"]) for row in self._state()["jobs"]
                    ]
                    raise UnavailableError(f"run {run} took over {limit_s:.0f} s; jobs: {stood}")
                looks.append((time.time(), self._use.seconds(pids)))
                time.sleep(_LOOK_S)
        finally:
            for process, _ in drivers:
                if process.poll() is None:
                    process.kill()
                process.wait()
        results = [
            JobResult(seed, _written(process, folder))
            for seed, (process, folder) in zip(seeds, drivers, strict=True)
        ]
        trace = self._client.get("/slackwater/coschedule/timeline").raise_for_status().content
        names = [f"default/{run}-{seed}" for seed in seeds]
        found = Run(results, account(stretches(trace), names, FIRST_STEPS), {}, self._state())
        found.used = _used(looks, *found.window())
        return found

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._client.get("/slackwater/coschedule").raise_for_status().json()
        return state

    def _start(
        self, name: str, seed: int, steps: int, profile: dict[str, float] | None
    ) -> tuple["subprocess.Popen[bytes]", Path]:
        terms: dict[str, object] = {"name": name, "iterations": steps, "slo": self._slo}
        terms |= {} if profile is None else {"profile": profile}
        self._client.post("/slackwater/jobs", json=terms).raise_for_status()
        folder = self._folder / "runs" / name
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", _MODULE, self._url, name, str(folder / "result.json")]
        shape = self._shape
        numbers = (seed, steps, shape.groups, shape.answers, shape.tokens)
        command += [str(number) for number in numbers]
        environment = os.environ | {"SLACKWATER_KEY": self._key, "OMP_NUM_THREADS": "1"}
        with (folder / "driver.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return process, folder


def _written(process: "subprocess.Popen[bytes]", folder: Path) -> dict[str, Any]:
    if process.returncode != 0:
        said = (folder / "driver.log").read_text()[-2000:]
        raise UnavailableError(f"job {folder.name} ended with {process.returncode}: {said}")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def _used(
    looks: Sequence[tuple[float, dict[str, float]]], from_s: float, to_s: float
) -> dict[str, float]:
    """Processor time by role over a stretch of time, per second of it."""
    inside = [look for look in looks if from_s <= look[0] <= to_s]
    if len(inside) < 2:
        return {}
    (began_s, first), (ended_s, last) = inside[0], inside[-1]
    return {role: (last[role] - first.get(role, 0.0)) / (ended_s - began_s) for role in last}
