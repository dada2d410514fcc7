"""Runs jobs alone and together on a service and times them from outside."""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from slackwater.cli.demo_display import DemoDisplay
from slackwater.cli.running_service import OVER, ServiceClient
from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.timeline.permit_account import account, stretches, without_warm_up

_MAX_DEMO_S = 1800.0
_WORKERS_S = 240.0  # a first start compiles

Rows: TypeAlias = Sequence[dict[str, Any]]
POLL_S = 0.2
_USES = (("rollout", "engine_s"), ("train", "trainer_s"))


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds and device seconds per iteration between two completed iterations."""

    until_s: float
    seconds: float
    used: Mapping[str, float]


@dataclass(slots=True)
class WatchedJob:
    """When each iteration was first seen complete, with the usage then, and the last row."""

    name: str
    marks: dict[int, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)

    def look(self, row: dict[str, Any], now_s: float) -> None:
        self.last = row
        self.marks.setdefault(row.get("iteration") or 0, (now_s, row))

    @property
    def began_s(self) -> float:
        """When its first iteration was complete: before that the job starts up."""
        return min(at_s for number, (at_s, _) in self.marks.items() if number >= 1)

    @property
    def ended_s(self) -> float:
        return max(at_s for at_s, _ in self.marks.values())

    def iterations_at(self, at_s: float) -> int:
        """Iterations seen complete by `at_s`."""
        return max(number for number, (seen_s, _) in self.marks.items() if seen_s <= at_s)

    @property
    def over(self) -> bool:
        return self.last.get("stage") in OVER

    def intervals(self) -> list[Interval]:
        """Intervals between completed iterations, or from the start if only one completed."""
        numbers = sorted(number for number in self.marks if number >= 1)
        if len(numbers) < 2:
            numbers = sorted(self.marks)
        return [self._interval(first, last) for first, last in itertools.pairwise(numbers)]

    def _interval(self, first: int, last: int) -> Interval:
        (began_s, before), (ended_s, after) = self.marks[first], self.marks[last]
        return Interval(
            until_s=ended_s,
            seconds=max(ended_s - began_s, POLL_S) / (last - first),
            used={what: (after[what] - before[what]) / (last - first) for _, what in _USES},
        )

    def usage_s(self, what: str, since_s: float, until_s: float) -> float:
        """Usage between two moments, by the marks inside."""
        inside = [row[what] for at_s, row in self.marks.values() if since_s <= at_s <= until_s]
        return float(inside[-1] - inside[0]) if len(inside) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class TypicalIteration:
    """Means over a job's iterations without stalls (compilation, checkpoints): those that took over
    twice the median. A median alone would be a multiple of the time between two looks.
    """

    seconds: float
    used: Mapping[str, float]

    @classmethod
    def from_job(cls, job: WatchedJob, until_s: float | None = None) -> "TypicalIteration":
        """Over iterations that ended by `until_s`, or over all if none did."""
        found = job.intervals()
        found = [each for each in found if until_s is None or each.until_s <= until_s] or found
        longest_s = 2 * statistics.median(each.seconds for each in found)
        found = [each for each in found if each.seconds <= longest_s]
        return cls(
            statistics.fmean(each.seconds for each in found),
            {what: statistics.fmean(each.used[what] for each in found) for _, what in _USES},
        )


def sharing_figures(
    jobs: Sequence[WatchedJob], alone: Mapping[str, TypicalIteration], iterations: Mapping[str, int]
) -> dict[str, Any]:
    """Iteration times of each job alone and shared, and the utilization of the pools.

    From when every job has made an iteration: `took_s` for the rest, and `alone_s` for the same
    iterations one job after the other.
    """
    both_s = min(job.ended_s for job in jobs)  # until the first job ended
    all_began_s = max(job.began_s for job in jobs)
    per_job = {}
    for job in jobs:
        alone_s, shared_s = alone[job.name].seconds, TypicalIteration.from_job(job, both_s).seconds
        per_job[job.name] = {
            "alone_s": alone_s,
            "shared_s": shared_s,
            "slowdown": shared_s / alone_s,
        }
    return {
        "per_job": per_job,
        "took_s": max(job.ended_s for job in jobs) - all_began_s,
        "alone_s": sum(
            (iterations[job.name] - job.iterations_at(all_began_s)) * alone[job.name].seconds
            for job in jobs
        ),
        "pools": _pool_use(jobs, alone),
    }


def _pool_use(
    jobs: Sequence[WatchedJob], alone: Mapping[str, TypicalIteration]
) -> dict[str, dict[str, float]]:
    """Utilization of each pool while all jobs ran, and in an iteration of one job alone."""
    window = (max(job.began_s for job in jobs), min(job.ended_s for job in jobs))
    both_s = max(window[1] - window[0], 1e-9)
    each = [alone[job.name] for job in jobs]
    return {
        pool: {
            "used_together": sum(job.usage_s(what, *window) for job in jobs) / both_s,
            "used_alone": sum(one.used[what] for one in each) / sum(one.seconds for one in each),
        }
        for pool, what in _USES
    }


Life: TypeAlias = Generator[None, Rows, None]


@dataclass(frozen=True, slots=True)
class SoloRun:
    """The measurements of one job alone: its typical iteration, and its profile."""

    typical: TypicalIteration
    profile: Mapping[str, float]


class DemoRun:
    """Runs a demo on the service at `url`, which was started for it; `quiet` prints nothing."""

    def __init__(self, url: str, key: str, folder: Path, *, quiet: bool) -> None:
        self._client = ServiceClient(url, key)
        self._folder = folder
        self._display = DemoDisplay(quiet=quiet)
        self._alone_rewards: dict[str, list[float]] = {}

    def run(self, files: Sequence[dict[str, Any]], alone: int | None) -> dict[str, Any]:
        """Run each job alone for so many iterations, or all, then all together; returns all
        figures.
        """
        self.wait_for_workers()
        self._model = files[0]["model"]
        with self._display:
            solo = {
                file["name"]: self._run_alone(file, alone or file["iterations"]) for file in files
            }
            return self._run_together(files, solo)

    # ---- alone ----
    def _run_alone(self, file: dict[str, Any], iterations: int) -> SoloRun:
        name = f"{file['name']}-alone"
        self._display.print_line(f"{file['name']} alone, {iterations} iterations as the baseline")
        self._client.ask(
            "POST",
            "/slackwater/jobs",
            {**file, "name": name, "iterations": iterations, "slo": 10.0},
        )
        (watched,) = self._follow([name], lambda _: None)
        first, *curves = _metrics_rows(watched.last)
        self._alone_rewards[file["name"]] = [row["reward"] for row in (first, *curves)]
        # An iteration without an update (all rewards equal) does not train.
        updated = [row for row in curves if row.get("optim/updates")] or [first]
        # The shortest times: other load on the machine only adds. The rollout includes the sync.
        profile = {
            "rollout_s": min(row["time/sample_s"] for row in curves),
            "train_s": min(row["time/train_s"] for row in updated),
            "sync_s": 0.0,
        }
        return SoloRun(TypicalIteration.from_job(watched), profile)

    # ---- together ----
    def _run_together(
        self, files: Sequence[dict[str, Any]], solo: Mapping[str, SoloRun]
    ) -> dict[str, Any]:
        names = [file["name"] for file in files]
        self._display.print_line(f"{' and '.join(names)} together")
        before = self._tokens()
        for file in files:
            self._client.ask(
                "POST", "/slackwater/jobs", {**file, "profile": dict(solo[file["name"]].profile)}
            )
        visit = self._instance_visit(sum(file["iterations"] for file in files))
        jobs = self._follow(names, visit.send)
        shared = self._client.ask("GET", "/slackwater/coschedule")
        figures = sharing_figures(
            jobs,
            {name: each.typical for name, each in solo.items()},
            {file["name"]: file["iterations"] for file in files},
        )
        per_job, pools = figures.pop("per_job"), figures["pools"]
        timeline, shares = self._timeline(jobs)
        for pool in pools:
            pools[pool]["held_together"] = shared["pools"][pool]["utilisation"]
        return {
            "jobs": [
                self._row(file, job)
                | per_job[job.name]
                | {"time": shares[job.name], "profile": dict(solo[job.name].profile)}
                for file, job in zip(files, jobs, strict=True)
            ],
            **figures,
            "tokens": {kind: made - before.get(kind, 0) for kind, made in self._tokens().items()},
            "permits": shared["permits"],
            "instance": self._instance,
            "timeline": timeline,
        }

    def _row(self, file: dict[str, Any], job: WatchedJob) -> dict[str, Any]:
        metrics = _metrics_rows(job.last)
        rewards = [row["reward"] for row in metrics]
        alone = self._alone_rewards[job.name]
        return {
            "job": job.name,
            "stage": job.last["stage"],
            "reason": job.last["reason"],
            "iterations": file["iterations"],
            "trained": sum(bool(row.get("optim/updates")) for row in metrics),
            "same_rewards": rewards[: len(alone)] == alone[: len(rewards)],
            "reward_first": _mean(rewards[:3]),
            "reward_last": _mean(rewards[-3:]),
            "bound": file.get("slo", 2.0),
        }

    def _instance_visit(self, total: int) -> Life:
        """Add an instance at 25 % of the iterations; kill it at 66 %, or once it is up."""
        self._instance: dict[str, Any] = {"came": None}

        def life() -> Life:
            rows = yield
            while _count_iterations(rows) < total * 0.25:
                rows = yield
            wanted = {"kind": "spot", "model": self._model}
            (name,) = self._client.ask("POST", "/slackwater/instances", wanted)["added"]
            self._display.print_line(f"instance {name} is added")
            self._instance["came"] = name
            asked_s = up_s = time.monotonic()
            mine: dict[str, Any] = {}
            while _count_iterations(rows) < total * 0.66 or mine.get("state") == "starting":
                rows = yield
                listed = self._client.ask("GET", "/slackwater/instances")["instances"]
                mine = next((row for row in listed if row["instance"] == name), {})
                if mine.get("state") == "starting":
                    up_s = time.monotonic()
            self._instance |= {"started_s": up_s - asked_s, "lived_s": time.monotonic() - up_s}
            self._instance["was"] = mine.get("state", "gone")
            if mine:
                self._client.ask("POST", f"/slackwater/instances/{name}/kill", {})
                self._display.print_line(f"instance {name} is killed")
            while True:
                yield

        started = life()
        next(started)
        return started

    # ---- the service ----
    def _follow(self, names: Sequence[str], look: Callable[[Rows], None]) -> list[WatchedJob]:
        """Poll the jobs until all are over, passing their rows to `look` each time."""
        jobs = [WatchedJob(name) for name in names]
        deadline_s = time.monotonic() + _MAX_DEMO_S
        while not all(job.over for job in jobs):
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"{', '.join(names)}: not done after {_MAX_DEMO_S:.0f} s")
            rows = {
                row.get("name"): row for row in self._client.ask("GET", "/slackwater/jobs")["jobs"]
            }
            for job in jobs:
                job.look(rows[job.name], time.monotonic())
            self._display.show([job.last for job in jobs])
            look([job.last for job in jobs])
            time.sleep(POLL_S)
        for job in jobs:
            job.last = self._client.ask("GET", f"/slackwater/jobs/{job.name}")
            if job.last["stage"] != "finished":
                raise RefusedError(f"{job.name} has {job.last['stage']}: {job.last['reason']}")
        return jobs

    def wait_for_workers(self) -> None:
        """Wait until an engine and a trainer are up."""
        deadline_s = time.monotonic() + _WORKERS_S
        while time.monotonic() < deadline_s:
            gauges = self._client.ask("GET", "/slackwater/status")["gauges"]
            if gauges["engines"] and gauges["trainers"]:
                return
            time.sleep(POLL_S)
        raise UnavailableError(f"no engine and no trainer came up within {_WORKERS_S:.0f} s")

    def _tokens(self) -> dict[str, int]:
        """Tokens of completed turns of the jobs' model so far, by kind of instance."""
        found: dict[str, int] = self._client.ask("GET", "/slackwater/status")["tokens"].get(
            self._model, {}
        )
        return found

    def _timeline(
        self, jobs: Sequence[WatchedJob]
    ) -> tuple[str, dict[str, dict[str, dict[str, float] | None]]]:
        """The trace file, and the split of each job's time alone and together, if it shows that."""
        trace = self._client.text("/slackwater/coschedule/timeline").encode()
        path = self._folder / "timeline.json"
        path.write_bytes(trace)
        permits = without_warm_up(stretches(trace))
        names = {job.name: str(job.last["job"]) for job in jobs}
        together = account(permits, list(names.values()), 1)
        shares: dict[str, dict[str, dict[str, float] | None]] = {}
        for name, job in names.items():
            alone = account(permits, [f"{job}-alone"], 1)
            shares[name] = {
                "alone": None if alone is None else alone.jobs[f"{job}-alone"].shares(),
                "shared": None if together is None else together.jobs[job].shares(),
            }
        return str(path), shares


def _metrics_rows(row: dict[str, Any]) -> list[dict[str, float]]:
    path = Path(row["run"]) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _count_iterations(rows: Sequence[dict[str, Any]]) -> int:
    return sum(row.get("iteration") or 0 for row in rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
