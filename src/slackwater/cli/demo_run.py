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
from slackwater.cli.running_service import ServiceClient
from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.timeline.permit_account import account, stretches, without_warm_up

_PATIENCE_S = 1800.0
_WORKERS_S = 240.0  # a first start compiles

Rows: TypeAlias = Sequence[dict[str, Any]]
LOOK_S = 0.2
_OVER = ("finished", "failed", "stopped", "refused")
_USES = (("rollout", "engine_s"), ("train", "trainer_s"))


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds and device seconds per iteration between two completed iterations."""

    until_s: float
    seconds: float
    used: Mapping[str, float]


@dataclass(slots=True)
class WatchedJob:
    """When each iteration was first seen complete, usage then, and the job's last row."""

    name: str
    marks: dict[int, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)

    def look(self, row: dict[str, Any], now_s: float) -> None:
        self.last = row
        self.marks.setdefault(row.get("iteration") or 0, (now_s, row))

    @property
    def began_s(self) -> float:
        """When its first iteration was done: before that it starts."""
        return min(at_s for number, (at_s, _) in self.marks.items() if number >= 1)

    @property
    def ended_s(self) -> float:
        return max(at_s for at_s, _ in self.marks.values())

    def done_by(self, at_s: float) -> int:
        """Iterations that were seen complete by then."""
        return max(number for number, (seen_s, _) in self.marks.items() if seen_s <= at_s)

    @property
    def over(self) -> bool:
        return self.last.get("stage") in _OVER

    def intervals(self) -> list[Interval]:
        """Intervals between completed iterations, or from the start if only one completed."""
        numbers = sorted(number for number in self.marks if number >= 1)
        if len(numbers) < 2:
            numbers = sorted(self.marks)
        found = []
        for first, last in itertools.pairwise(numbers):
            (began_s, before), (ended_s, after) = self.marks[first], self.marks[last]
            found.append(
                Interval(
                    until_s=ended_s,
                    seconds=max(ended_s - began_s, LOOK_S) / (last - first),
                    used={what: (after[what] - before[what]) / (last - first) for _, what in _USES},
                )
            )
        return found

    def used_s(self, what: str, since_s: float, until_s: float) -> float:
        """Usage between two moments, by the marks inside."""
        inside = [row[what] for at_s, row in self.marks.values() if since_s <= at_s <= until_s]
        return float(inside[-1] - inside[0]) if len(inside) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class TypicalIteration:
    """Medians over a job's iterations, which exclude stalls (compilation, checkpoints)."""

    seconds: float
    used: Mapping[str, float]

    @classmethod
    def of(cls, job: WatchedJob, until_s: float | None = None) -> "TypicalIteration":
        """Of those that ended by `until_s`; of all, if none did."""
        found = job.intervals()
        found = [one for one in found if until_s is None or one.until_s <= until_s] or found
        return cls(
            statistics.median(one.seconds for one in found),
            {what: statistics.median(one.used[what] for one in found) for _, what in _USES},
        )


def sharing_figures(
    jobs: Sequence[WatchedJob], alone: Mapping[str, TypicalIteration], iterations: Mapping[str, int]
) -> dict[str, Any]:
    """Per job the iteration times alone and shared; pool utilization; and, from when each had made
    an iteration, how long the rest took, and would take one job after the other.
    """
    both_s = min(job.ended_s for job in jobs)  # until the first was done
    all_began_s = max(job.began_s for job in jobs)
    per_job = {}
    for job in jobs:
        alone_s, shared_s = alone[job.name].seconds, TypicalIteration.of(job, both_s).seconds
        per_job[job.name] = {
            "alone_s": alone_s,
            "shared_s": shared_s,
            "slowdown": shared_s / alone_s,
        }
    return {
        "per_job": per_job,
        "took_s": max(job.ended_s for job in jobs) - all_began_s,
        "alone_s": sum(
            (iterations[job.name] - job.done_by(all_began_s)) * alone[job.name].seconds
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
            "used_together": sum(job.used_s(what, *window) for job in jobs) / both_s,
            "used_alone": sum(one.used[what] for one in each) / sum(one.seconds for one in each),
        }
        for pool, what in _USES
    }


Life: TypeAlias = Generator[None, Rows, None]


@dataclass(frozen=True, slots=True)
class Alone:
    """One job alone: its typical iteration, and the profile for its later submission."""

    typical: TypicalIteration
    profile: Mapping[str, float]


class DemoRun:
    """`url` and `key` are of a service started for the demo; `quiet` shows nothing."""

    def __init__(self, url: str, key: str, folder: Path, *, quiet: bool) -> None:
        self._client = ServiceClient(url, key)
        self._folder = folder
        self._display = DemoDisplay(quiet=quiet)
        self._alone_rewards: dict[str, list[float]] = {}

    def of(self, files: Sequence[dict[str, Any]], alone: int) -> dict[str, Any]:
        """Everything that the table says."""
        self.wait_for_workers()
        self._model = files[0]["model"]
        with self._display:
            solo = {file["name"]: self._alone(file, alone) for file in files}
            return self._together(files, solo)

    # ---- alone ----
    def _alone(self, file: dict[str, Any], iterations: int) -> Alone:
        name = f"{file['name']}-alone"
        self._display.say(f"{file['name']} alone, {iterations} iterations, to compare with")
        self._client.ask(
            "POST",
            "/slackwater/jobs",
            {**file, "name": name, "iterations": iterations, "slo": 10.0},
        )
        (watched,) = self._follow([name], lambda _: None)
        first, *curves = _curves(watched.last)
        self._alone_rewards[file["name"]] = [row["reward"] for row in (first, *curves)]
        # an iteration whose answers teach nothing trains nothing
        updated = [row for row in curves if row.get("optim/updates")] or [first]
        # the shortest: what else the machine does only adds to it; sync is in the rollout
        profile = {
            "rollout_s": min(row["time/sample_s"] for row in curves),
            "train_s": min(row["time/train_s"] for row in updated),
            "sync_s": 0.0,
        }
        return Alone(TypicalIteration.of(watched), profile)

    # ---- together ----
    def _together(
        self, files: Sequence[dict[str, Any]], solo: Mapping[str, Alone]
    ) -> dict[str, Any]:
        names = [file["name"] for file in files]
        self._display.say(f"{' and '.join(names)} together")
        before = self._tokens()
        for file in files:
            self._client.ask(
                "POST", "/slackwater/jobs", {**file, "profile": dict(solo[file["name"]].profile)}
            )
        visit = self._visit(sum(file["iterations"] for file in files))
        jobs = self._follow(names, visit.send)
        shared = self._shared()
        figures = sharing_figures(
            jobs,
            {name: one.typical for name, one in solo.items()},
            {file["name"]: file["iterations"] for file in files},
        )
        per_job, pools = figures.pop("per_job"), figures["pools"]
        timeline, shares = self._timeline(jobs)
        if shared is not None:
            for pool in pools:
                pools[pool]["held_together"] = shared["pools"][pool]["utilisation"]
        return {
            "jobs": [
                self._row(file, one)
                | per_job[one.name]
                | {"time": shares[one.name], "profile": dict(solo[one.name].profile)}
                for file, one in zip(files, jobs, strict=True)
            ],
            **figures,
            "tokens": {kind: made - before.get(kind, 0) for kind, made in self._tokens().items()},
            "permits": None if shared is None else shared["permits"],
            "instance": self._instance,
            "timeline": timeline,
        }

    def _row(self, file: dict[str, Any], one: WatchedJob) -> dict[str, Any]:
        rewards = [row["reward"] for row in _curves(one.last)]
        alone = self._alone_rewards[one.name]
        return {
            "job": one.name,
            "stage": one.last["stage"],
            "reason": one.last["reason"],
            "iterations": file["iterations"],
            "trained": sum(bool(row.get("optim/updates")) for row in _curves(one.last)),
            "same_rewards": rewards[: len(alone)] == alone[: len(rewards)],
            "reward_first": _mean(rewards[:3]),
            "reward_last": _mean(rewards[-3:]),
            "bound": file.get("slo", 2.0),
        }

    def _visit(self, total: int) -> Life:
        """Add an instance at 25 % of the iterations; kill it when it is up, at 66 % or later."""
        self._instance: dict[str, Any] = {"came": None}

        def life() -> Life:
            rows = yield
            while _done(rows) < total * 0.25:
                rows = yield
            wanted = {"kind": "spot", "model": self._model}
            (name,) = self._client.ask("POST", "/slackwater/instances", wanted)["added"]
            self._display.say(f"instance {name} comes")
            self._instance["came"] = name
            asked_s = up_s = time.monotonic()
            mine: dict[str, Any] = {}
            while _done(rows) < total * 0.66 or mine.get("state") == "starting":
                rows = yield
                listed = self._client.ask("GET", "/slackwater/instances")["instances"]
                mine = next((row for row in listed if row["instance"] == name), {})
                if mine.get("state") == "starting":
                    up_s = time.monotonic()
            self._instance |= {"started_s": up_s - asked_s, "lived_s": time.monotonic() - up_s}
            self._instance["was"] = mine.get("state", "gone")
            if mine:
                self._client.ask("POST", f"/slackwater/instances/{name}/kill", {})
                self._display.say(f"instance {name} is killed")
            while True:
                yield

        started = life()
        next(started)
        return started

    # ---- the service ----
    def _follow(self, names: Sequence[str], look: Callable[[Rows], None]) -> list[WatchedJob]:
        """Until all of them are over."""
        jobs = [WatchedJob(name) for name in names]
        deadline_s = time.monotonic() + _PATIENCE_S
        while not all(job.over for job in jobs):
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"{', '.join(names)}: not done after {_PATIENCE_S:.0f} s")
            rows = {
                row.get("name"): row for row in self._client.ask("GET", "/slackwater/jobs")["jobs"]
            }
            for job in jobs:
                job.look(rows[job.name], time.monotonic())
            self._display.show([job.last for job in jobs])
            look([job.last for job in jobs])
            time.sleep(LOOK_S)
        for job in jobs:
            job.last = self._client.ask("GET", f"/slackwater/jobs/{job.name}")
            if job.last["stage"] != "finished":
                raise RefusedError(f"{job.name} has {job.last['stage']}: {job.last['reason']}")
        return jobs

    def wait_for_workers(self) -> None:
        """Until an engine and a trainer are up."""
        deadline_s = time.monotonic() + _WORKERS_S
        while time.monotonic() < deadline_s:
            gauges = self._client.ask("GET", "/slackwater/status")["gauges"]
            if gauges["engines"] and gauges["trainers"]:
                return
            time.sleep(LOOK_S)
        raise UnavailableError(f"no engine and no trainer came up within {_WORKERS_S:.0f} s")

    def _tokens(self) -> dict[str, int]:
        """Tokens of completed turns of the jobs' model so far, by kind of instance."""
        found: dict[str, int] = self._client.ask("GET", "/slackwater/status")["tokens"].get(
            self._model, {}
        )
        return found

    def _shared(self) -> dict[str, Any] | None:
        """What the co-scheduler says, if the service has one."""
        answer = self._client.send("GET", "/slackwater/coschedule")
        found: dict[str, Any] | None = None if answer.is_error else answer.json()
        return found

    def _timeline(
        self, jobs: Sequence[WatchedJob]
    ) -> tuple[str | None, dict[str, dict[str, dict[str, float] | None]]]:
        """The file to look at, and how each job's time divides, alone and together."""
        answer = self._client.send("GET", "/slackwater/coschedule/timeline")
        if answer.is_error:
            return None, {job.name: {"alone": None, "shared": None} for job in jobs}
        path = self._folder / "timeline.json"
        path.write_bytes(answer.content)
        permits = without_warm_up(stretches(answer.content))
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


def _curves(row: dict[str, Any]) -> list[dict[str, float]]:
    path = Path(row["run"]) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _done(rows: Sequence[dict[str, Any]]) -> int:
    return sum(row.get("iteration") or 0 for row in rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
