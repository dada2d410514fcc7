"""Runs jobs alone and together on a service and times them from outside."""

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from slackwater.cli.demo_display import DemoDisplay
from slackwater.cli.demo_figures import LOOK_S, Rows, TypicalIteration, WatchedJob, sharing_figures
from slackwater.cli.running_service import ServiceClient
from slackwater.model.errors import RefusedError, UnavailableError

_PATIENCE_S = 1800.0
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

    def of(self, files: Sequence[dict[str, Any]], alone: int) -> dict[str, Any]:
        """Everything that the table says."""
        self._wait_for_workers()
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
        curves = _curves(watched.last)[1:]
        # the shortest: what else the machine does only adds to it; sync is in the rollout
        profile = {
            "rollout_s": min(row["time/sample_s"] for row in curves),
            "train_s": min(row["time/train_s"] for row in curves),
            "sync_s": 0.0,
        }
        return Alone(TypicalIteration.of(watched), profile)

    # ---- together ----
    def _together(
        self, files: Sequence[dict[str, Any]], solo: Mapping[str, Alone]
    ) -> dict[str, Any]:
        names = [file["name"] for file in files]
        self._display.say(f"{' and '.join(names)} together")
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
        if shared is not None:
            for pool in pools:
                pools[pool]["held_together"] = shared["pools"][pool]["utilisation"]
        return {
            "jobs": [
                self._row(file, one) | per_job[one.name]
                for file, one in zip(files, jobs, strict=True)
            ],
            **figures,
            "permits": None if shared is None else shared["permits"],
            "instance": self._instance,
            "timeline": self._timeline(),
        }

    def _row(self, file: dict[str, Any], one: WatchedJob) -> dict[str, Any]:
        rewards = [row["reward"] for row in _curves(one.last)]
        return {
            "job": one.name,
            "stage": one.last["stage"],
            "reason": one.last["reason"],
            "iterations": file["iterations"],
            "reward_first": _mean(rewards[:3]),
            "reward_last": _mean(rewards[-3:]),
            "bound": file.get("slo", 2.0),
        }

    def _visit(self, total: int) -> Life:
        """Add an instance at 25 % of the iterations and kill it at 66 %."""
        self._instance: dict[str, Any] = {"came": None}

        def life() -> Life:
            rows = yield
            while _done(rows) < total * 0.25:
                rows = yield
            (name,) = self._client.ask("POST", "/slackwater/instances", {"kind": "spot"})["added"]
            self._display.say(f"instance {name} comes")
            self._instance["came"] = name
            while _done(rows) < total * 0.66:
                rows = yield
            listed = self._client.ask("GET", "/slackwater/instances")["instances"]
            mine: dict[str, Any] = next((row for row in listed if row["instance"] == name), {})
            self._instance["was"] = mine.get("state", "gone")
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
            slow = {row["job"]: row["slowdown"] for row in (self._shared() or {"jobs": []})["jobs"]}
            for job in jobs:
                job.look(rows[job.name], time.monotonic())
                said = slow.get(job.last["job"])
                job.slowdown = said if said is not None else job.slowdown
            self._display.show([job.last for job in jobs])
            look([job.last for job in jobs])
            time.sleep(LOOK_S)
        for job in jobs:
            job.last = self._client.ask("GET", f"/slackwater/jobs/{job.name}")
            if job.last["stage"] != "finished":
                raise RefusedError(f"{job.name} has {job.last['stage']}: {job.last['reason']}")
        return jobs

    def _wait_for_workers(self) -> None:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            gauges = self._client.ask("GET", "/slackwater/status")["gauges"]
            if gauges["engines"] and gauges["trainers"]:
                return
            time.sleep(LOOK_S)
        raise UnavailableError("no engine and no trainer came up within 120 s")

    def _shared(self) -> dict[str, Any] | None:
        """What the co-scheduler says, if the service has one."""
        answer = self._client.send("GET", "/slackwater/coschedule")
        found: dict[str, Any] | None = None if answer.is_error else answer.json()
        return found

    def _timeline(self) -> str | None:
        answer = self._client.send("GET", "/slackwater/coschedule/timeline")
        if answer.is_error:
            return None
        path = self._folder / "timeline.json"
        path.write_bytes(answer.content)
        return str(path)


def _curves(row: dict[str, Any]) -> list[dict[str, float]]:
    path = Path(row["run"]) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _done(rows: Sequence[dict[str, Any]]) -> int:
    return sum(row.get("iteration") or 0 for row in rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
