"""Jobs alone and together on a service, timed from outside: by when each iteration was seen to be done."""

import json
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from slackwater.cli.demo_display import DemoDisplay
from slackwater.model.errors import RefusedError, UnavailableError

_LOOK_S = 0.2
_PATIENCE_S = 1800.0
Rows: TypeAlias = Sequence[dict[str, Any]]
Life: TypeAlias = Generator[None, Rows, None]

_OVER = ("finished", "failed", "stopped", "refused")


@dataclass(slots=True)
class Watched:
    """One job: when each of its iterations was first seen to be done, what it had used then, and how it stood last."""

    name: str
    seen_s: dict[int, float] = field(default_factory=dict)
    accounts: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    slowdown: float | None = None

    def look(self, row: dict[str, Any], now_s: float) -> None:
        self.last = row
        if (row.get("iteration") or 0) not in self.seen_s:
            self.seen_s[row.get("iteration") or 0] = now_s
            self.accounts.append((now_s, row))

    def used_s(self, what: str, since_s: float, until_s: float) -> float:
        """How much of its account came between two moments, by the marks next to them."""
        marks = [row[what] for at_s, row in self.accounts if since_s <= at_s <= until_s]
        return float(marks[-1] - marks[0]) if len(marks) > 1 else 0.0

    @property
    def began_s(self) -> float:
        """When its first iteration was done: before that it starts."""
        return min(at for n, at in self.seen_s.items() if n >= 1)

    @property
    def ended_s(self) -> float:
        return max(self.seen_s.values())

    @property
    def over(self) -> bool:
        return self.last.get("stage") in _OVER

    def iteration_s(self, until_s: float) -> float:
        """Seconds for one iteration, without the first, which starts everything; of all of them, if few were done by then."""
        marks = sorted((n, at) for n, at in self.seen_s.items() if n >= 1)
        early = [mark for mark in marks if mark[1] <= until_s]
        (first, began_s), *_, (last, ended_s) = early if len(early) >= 2 else (*marks, *marks)
        if last == first:
            first, began_s = 0, self.seen_s[0]
        return max(ended_s - began_s, _LOOK_S) / (last - first)


class DemoRun:
    """`url` and `key` are a service's of its own; `quiet` shows nothing."""

    def __init__(self, url: str, key: str, folder: Path, *, quiet: bool) -> None:
        import httpx

        self._client = httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=30)
        self._folder = folder
        self._display = DemoDisplay(quiet=quiet)

    def of(self, files: Sequence[dict[str, Any]], alone: int) -> dict[str, Any]:
        """Everything that the table says."""
        self._wait_for_workers()
        with self._display:
            solo = {file["name"]: self._alone(file, alone) for file in files}
            return self._together(files, solo)

    # ---- alone ----
    def _alone(self, file: dict[str, Any], iterations: int) -> dict[str, Any]:
        name = f"{file['name']}-alone"
        self._display.say(f"{file['name']} alone, {iterations} iterations, to compare with")
        self._submit({**file, "name": name, "iterations": iterations, "slo": 10.0})
        (watched,) = self._follow([name], lambda _: None)
        curves = _curves(watched.last)[1:]
        rollouts = [row["time/sample_s"] for row in curves]
        trains = [row["time/train_s"] for row in curves]
        window = (watched.began_s, watched.ended_s)
        return {
            "iteration_s": statistics.median(rollouts) + statistics.median(trains),
            "rollout_s": min(rollouts),  # as a profile: what else the machine does only adds to it
            "train_s": min(trains),
            "window_s": watched.ended_s - watched.began_s,
            "engine_s": watched.used_s("engine_s", *window),
            "trainer_s": watched.used_s("trainer_s", *window),
        }

    # ---- together ----
    def _together(
        self, files: Sequence[dict[str, Any]], solo: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        names = [file["name"] for file in files]
        self._display.say(f"{' and '.join(names)} together")
        for file in files:
            known = solo[file["name"]]
            lengths = {"rollout_s": known["rollout_s"], "train_s": known["train_s"]}
            self._submit({**file, "profile": {**lengths, "sync_s": 0.0}})  # inside the rollout's
        guest = self._guest(sum(file["iterations"] for file in files))
        jobs = self._follow(names, guest.send)
        took_s = max(job.ended_s for job in jobs) - min(job.began_s for job in jobs)
        shared = self._shared()
        rows = [self._row(file, one, solo, jobs) for file, one in zip(files, jobs, strict=True)]
        return {
            "jobs": rows,
            "took_s": took_s,
            "alone_s": sum((row["iterations"] - 1) * row["alone_s"] for row in rows),
            "pools": _pools(jobs, solo, shared),
            "permits": None if shared is None else shared["permits"],
            "instance": self._instance,
            "timeline": self._timeline(),
        }

    def _row(
        self,
        file: dict[str, Any],
        one: Watched,
        solo: dict[str, dict[str, Any]],
        jobs: Sequence[Watched],
    ) -> dict[str, Any]:
        both_s = min(watched.ended_s for watched in jobs)  # until the first was done
        rewards = [row["reward"] for row in _curves(one.last)]
        alone_s, shared_s = solo[one.name]["iteration_s"], one.iteration_s(both_s)
        return {
            "job": one.name,
            "stage": one.last["stage"],
            "reason": one.last["reason"],
            "iterations": file["iterations"],
            "reward_first": _mean(rewards[:3]),
            "reward_last": _mean(rewards[-3:]),
            "alone_s": alone_s,
            "shared_s": shared_s,
            "slowdown": shared_s / alone_s,
            "slowdown_said": one.slowdown,
            "bound": file.get("slo", 2.0),
        }

    def _guest(self, total: int) -> Life:
        """Once a quarter is done an instance comes, and at two thirds it is killed, in the middle of whatever it does."""
        self._instance: dict[str, Any] = {"came": None}

        def life() -> Life:
            rows = yield
            while _done(rows) < total * 0.25:
                rows = yield
            (name,) = self._ask("POST", "/slackwater/instances", {"kind": "spot"})["added"]
            self._display.say(f"instance {name} comes")
            self._instance["came"] = name
            while _done(rows) < total * 0.66:
                rows = yield
            listed = self._ask("GET", "/slackwater/instances")["instances"]
            mine: dict[str, Any] = next((row for row in listed if row["instance"] == name), {})
            self._instance["was"] = mine.get("state", "gone")
            self._ask("POST", f"/slackwater/instances/{name}/kill", {})
            self._display.say(f"instance {name} is killed")
            while True:
                yield

        started = life()
        next(started)
        return started

    # ---- the service ----
    def _follow(self, names: Sequence[str], look: Callable[[Rows], None]) -> list[Watched]:
        """Until all of them are over."""
        jobs = [Watched(name) for name in names]
        deadline_s = time.monotonic() + _PATIENCE_S
        while not all(job.over for job in jobs):
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"{', '.join(names)}: not done after {_PATIENCE_S:.0f} s")
            rows = {row.get("name"): row for row in self._ask("GET", "/slackwater/jobs")["jobs"]}
            slow = {row["job"]: row["slowdown"] for row in (self._shared() or {"jobs": []})["jobs"]}
            for job in jobs:
                job.look(rows[job.name], time.monotonic())
                said = slow.get(job.last["job"])
                job.slowdown = said if said is not None else job.slowdown
            self._display.show([job.last for job in jobs])
            look([job.last for job in jobs])
            time.sleep(_LOOK_S)
        for job in jobs:
            job.last = self._ask("GET", f"/slackwater/jobs/{job.name}")
            if job.last["stage"] != "finished":
                raise RefusedError(f"{job.name} has {job.last['stage']}: {job.last['reason']}")
        return jobs

    def _wait_for_workers(self) -> None:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            gauges = self._ask("GET", "/slackwater/status")["gauges"]
            if gauges["engines"] and gauges["trainers"]:
                return
            time.sleep(_LOOK_S)
        raise UnavailableError("no engine and no trainer came up within 120 s")

    def _submit(self, file: dict[str, Any]) -> None:
        self._ask("POST", "/slackwater/jobs", file)

    def _shared(self) -> dict[str, Any] | None:
        """What the co-scheduler says, if the service has one."""
        answer = self._client.get("/slackwater/coschedule")
        found: dict[str, Any] | None = None if answer.is_error else answer.json()
        return found

    def _timeline(self) -> str | None:
        answer = self._client.get("/slackwater/coschedule/timeline")
        if answer.is_error:
            return None
        path = self._folder / "timeline.json"
        path.write_bytes(answer.content)
        return str(path)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = self._client.request(method, path, json=body)
        if answer.is_error:
            raise RefusedError(f"{path}: {answer.text}")
        found: dict[str, Any] = answer.json()
        return found


def _pools(
    jobs: Sequence[Watched], solo: dict[str, dict[str, Any]], shared: dict[str, Any] | None
) -> dict[str, dict[str, float]]:
    """The share of the time in which each pool worked: while all jobs ran, and while one of them ran alone."""
    window = (max(job.began_s for job in jobs), min(job.ended_s for job in jobs))
    both_s = max(window[1] - window[0], 1e-9)
    pools: dict[str, dict[str, float]] = {}
    for pool, used in (("rollout", "engine_s"), ("train", "trainer_s")):
        alone = [solo[job.name] for job in jobs]
        pools[pool] = {
            "used_together": sum(job.used_s(used, *window) for job in jobs) / both_s,
            "used_alone": sum(one[used] for one in alone) / sum(one["window_s"] for one in alone),
        }
        if shared is not None:
            pools[pool]["held_together"] = shared["pools"][pool]["utilisation"]
    return pools


def _curves(row: dict[str, Any]) -> list[dict[str, float]]:
    path = Path(row["run"]) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _done(rows: Sequence[dict[str, Any]]) -> int:
    return sum(row.get("iteration") or 0 for row in rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
