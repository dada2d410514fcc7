"""One service that GRPO jobs are run on, alone or together, and what each run came to."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from benchmarks.processor_use import HOST, ProcessorUse, beside_phases
from slackwater.model.errors import UnavailableError
from slackwater.model.job_life import JobStage
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.timeline.permit_account import (
    Account,
    JobTimes,
    Stretch,
    account,
    stretches,
)

FIRST_STEPS = 3  # profiled, placed, and in step with the others by then
_MODULE = "benchmarks.coscheduling.grpo_driver"
_LOOK_S = 1.0
# A run that loses more of all processors to the host is made again, so often, and in all so many.
_HOST_SHARE, _TRIES, _RETAKEN = 0.01, 3, 8
_ASK_EVERY = 5  # looks; the control plane has the same cores


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
        inside = self.inside(from_s, to_s)
        return (len(inside) - 1) / (inside[-1] - inside[0])

    def inside(self, from_s: float, to_s: float) -> list[float]:
        """When steps between two moments ended."""
        return [at_s for at_s in self.ended_s if from_s <= at_s <= to_s]

    def differs(self, other: "JobResult") -> int:
        """How many answers and losses are not the same to the bit."""
        found = 0
        for part in ("tokens", "losses"):
            mine, others = self.wrote[part], other.wrote[part]
            found += abs(len(mine) - len(others))
            found += sum(int(a != b) for a, b in zip(mine, others, strict=False))
        return found


@dataclass(slots=True)
class Run:
    """Jobs that ran at the same time, and their permits. `used` is processor time by role while all
    of them made steps, per second of that; `held` says why jobs were kept waiting by the
    co-scheduler, by their names.
    """

    results: list[JobResult]
    found: Account | None
    used: dict[str, float]
    permits: list[Stretch]
    held: dict[str, str] = field(default_factory=dict)

    def window(self) -> tuple[float, float]:
        """While all of them made steps."""
        from_s = max(result.ended_s[FIRST_STEPS - 1] for result in self.results)
        return from_s, min(result.ended_s[-1] for result in self.results)

    @property
    def together(self) -> bool:
        """Whether there was such a time, with two steps of each in it: a job that is held runs
        after the others.
        """
        window = self.window()
        return self.found is not None and all(
            len(result.inside(*window)) > 1 for result in self.results
        )

    @property
    def account(self) -> Account:
        """Where the time of jobs that ran together went."""
        assert self.found is not None
        return self.found

    @property
    def times(self) -> JobTimes:
        """Of a run's only job."""
        (times,) = self.account.jobs.values()
        return times

    @property
    def host_share(self) -> float:
        """How much of all processors the host of a virtual machine took away meanwhile."""
        return self.used.get(HOST, 0.0) / (os.cpu_count() or 1)

    @property
    def beside(self) -> float:
        """Processors used by everybody but the workers that phases run on."""
        return beside_phases(self.used)


def profile_of(runs: Sequence[Run]) -> dict[str, float]:
    """What a job is submitted with: the means of what was seen of it alone, more than once if it
    was.
    """
    return {
        name: mean(getattr(run.times, name) for run in runs)
        for name in ("rollout_s", "train_s", "sync_s")
    }


class Shop:
    """Runs jobs on one service."""

    def __init__(self, url: str, key: str, folder: Path, shape: Shape, slo: float) -> None:
        self._url, self._key, self._folder = url, key, folder
        self._shape, self._slo = shape, slo
        self._client = httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=60.0)
        server = StateDirectory(folder / "state").read_server()
        assert server is not None
        self._use = ProcessorUse(int(server["pid"]))
        self.results: list[JobResult] = []  # of all runs, also those that were made again
        self.permits: list[Stretch] = []
        # runs that were made again, since the host of a virtual machine took too much of the first
        self.retaken = 0

    def close(self) -> None:
        self._client.close()

    def run(
        self,
        run: str,
        seeds: Sequence[int],
        steps: int,
        limit_s: float,
        known: Sequence[Sequence[Run]] = (),
    ) -> Run:
        """Jobs with these seeds together; each comes with the profile that runs of its own, in
        `known`, give it, and without them it is profiled.

        Of a run that the host disturbed and those made in its place the least disturbed counts.
        """
        runs = [self._run(run, seeds, steps, limit_s, known)]
        while runs[-1].host_share > _HOST_SHARE and len(runs) < _TRIES and self.retaken < _RETAKEN:
            self.retaken += 1
            runs.append(self._run(f"{run}-{len(runs)}", seeds, steps, limit_s, known))
        return min(runs, key=lambda one: one.host_share)

    def _run(
        self,
        run: str,
        seeds: Sequence[int],
        steps: int,
        limit_s: float,
        known: Sequence[Sequence[Run]],
    ) -> Run:
        drivers = [
            self._start(
                *(f"{run}-{seed}", seed, steps),
                profile_of(known[seed]) if known and known[seed] else None,
            )
            for seed in seeds
        ]
        names = [f"default/{run}-{seed}" for seed in seeds]
        pids = tuple(process.pid for process, _ in drivers)
        looks: list[tuple[float, dict[str, float]]] = []
        held: dict[str, str] = {}
        deadline_s = time.monotonic() + limit_s
        try:
            while any(process.poll() is None for process, _ in drivers):
                if time.monotonic() > deadline_s:
                    stood = [
                        (row["job"], row["stage"], row["reason"]) for row in self._state()["jobs"]
                    ]
                    raise UnavailableError(f"run {run} took over {limit_s:.0f} s; jobs: {stood}")
                looks.append((time.time(), self._use.seconds(pids)))
                if len(looks) % _ASK_EVERY == 0 and len(seeds) > 1:
                    held |= self._held(names)
                time.sleep(_LOOK_S)
        finally:
            unfinished = [process for process, _ in drivers if process.poll() is None]
            for process in unfinished:
                process.kill()
                process.wait()
            for name in names if unfinished else ():  # else their places would be theirs for long
                self._end(name.removeprefix("default/"))
        results = [
            JobResult(seed, _written(process, folder))
            for seed, (process, folder) in zip(seeds, drivers, strict=True)
        ]
        self.results += results
        trace = self._client.get("/slackwater/coschedule/timeline").raise_for_status().content
        permits = [one for one in stretches(trace) if one.job in names]
        self.permits += permits
        found = Run(results, account(permits, names, FIRST_STEPS), {}, permits, held)
        found.used = _used(looks, *found.window())
        return found

    def _end(self, name: str) -> None:
        body = {"outcome": "stopped", "reason": "its run was given up"}
        self._client.request("DELETE", f"/slackwater/jobs/{name}", json=body)

    def switches(self) -> int:
        """How often a permit found another job's state on its node."""
        return int(self._state()["permits"]["switches"])

    def _held(self, names: Sequence[str]) -> dict[str, str]:
        """Which of them wait for room now, and why."""
        return {
            row["job"]: row["reason"]
            for row in self._state()["jobs"]
            if row["job"] in names and row["stage"] == JobStage.HELD
        }

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
