"""A recorded run as the dashboard's source: a Perfetto trace, or the folder of a run.

`slackwater sim run --trace`, `plan --trace`, `demo` and every stopping service write traces. A
folder is that of a demo, of a service, or of `slackwater train`.
"""

import secrets
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import msgspec

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.model.folder import read_object
from slackwater.model.ids import TenantId
from slackwater.model.slack import slack_row
from slackwater.serve.dashboard.browser_sessions import Viewer
from slackwater.serve.dashboard.source import PlannedFleet, PlannedJob, read_curves
from slackwater.timeline.lanes import (
    FAULT,
    KINDS,
    ROLLOUT,
    SWITCH,
    SYNC,
    TAIL,
    TRAIN,
    LaneTimeline,
    TimelineLane,
)
from slackwater.wire.driver_files import DriverFiles

_LOG_BYTES = 1 << 16
_DEFAULT_SLO = 2.0


class _Event(msgspec.Struct):
    ph: str
    name: str
    pid: int = 0
    tid: int = 0
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents", default_factory=list)


class RecordedSource:
    """Reads the run once; nothing can be changed. `key` is a new random login key."""

    mode: Literal["live", "recording"] = "recording"

    def __init__(self, run: Path) -> None:
        self.key = secrets.token_urlsafe(24)
        self.timeline = LaneTimeline()
        self._name = run.name
        self._end_s = 0.0
        trace, self._folders = _find_run(run)
        if trace is not None:
            self._read_trace(trace)
        self._jobs = self._job_rows()
        self._figures = self._all_figures()

    def viewer(self, key: str) -> Viewer | None:
        same = secrets.compare_digest(key.encode(), self.key.encode())
        return Viewer(TenantId(""), True) if same else None

    def now_s(self) -> float:
        return self._end_s

    def is_closing(self) -> bool:
        return False

    def sees(self, viewer: Viewer, job: str) -> bool:
        return True

    # ---- reading ----
    def _read_trace(self, path: Path) -> None:
        try:
            events = msgspec.json.decode(path.read_bytes(), type=_Trace).events
        except (OSError, msgspec.MsgspecError) as error:
            fix = f"is no trace that slackwater wrote: {error}"
            raise ConfigError.of("RUN", str(path), fix) from None
        pools = {e.pid: str(e.args["name"]) for e in events if e.name == "process_name"}
        named = [e for e in events if e.name == "thread_name"]
        lanes = {
            (e.pid, e.tid): self.timeline.lane(str(e.args["name"]), pools.get(e.pid, "nodes"))
            for e in sorted(named, key=lambda e: (e.pid, e.tid))
        }
        for event in sorted((e for e in events if e.ph == "X"), key=lambda e: e.ts):
            lane = lanes.get((event.pid, event.tid))
            start_s, end_s = event.ts / 1e6, (event.ts + event.dur) / 1e6
            self._end_s = max(self._end_s, end_s)
            if lane is None:
                continue
            if event.cat == "rental":
                lane.rented_s.append((start_s, end_s))
                continue
            phase, _, what = event.cat.partition(",")
            kind = {"switch": SWITCH, "tail": TAIL}.get(what)
            kind = kind if kind is not None else KINDS.index(phase)
            job = self.timeline.job_number(str(event.args.get("job", event.name)))
            self.timeline.append(lane, job, kind, start_s, end_s)

    def _job_rows(self) -> dict[str, dict[str, Any]]:
        """A job that was given nodes is seen on those: its engines did the same at the same time.
        Weights move on engines only.
        """
        lengths_s: dict[str, dict[int, dict[str, list[float]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        first_s: dict[str, float] = {}
        last_s: dict[str, float] = {}
        lanes = self.timeline.lanes()
        placed = {job for lane in lanes if _is_node(lane) for job in lane.jobs}
        for lane in lanes:
            for place, number in enumerate(lane.jobs):
                kind = lane.kinds[place]
                is_duplicate = number in placed and not _is_node(lane) and kind != SYNC
                if kind == FAULT or is_duplicate:
                    continue
                job = self.timeline.jobs[number]
                start_s, end_s = lane.starts_s[place], lane.ends_s[place]
                lengths_s[job][kind][lane.name].append(end_s - start_s)
                first_s[job] = min(first_s.get(job, start_s), start_s)
                last_s[job] = max(last_s.get(job, end_s), end_s)
        rows = {
            job: _job_row(job, by_kind, first_s[job], last_s[job])
            for job, by_kind in lengths_s.items()
            if not job.startswith("weights of ")
        }
        for name, folder in self._folders.items():
            curves = read_curves(_run_folder(folder) / "metrics.jsonl")
            job = next((job for job in rows if job.rpartition("/")[2] == name), name)
            row = rows.setdefault(job, _empty_row(job))
            row["folder"] = folder
            if curves:
                rewards = curves.get("reward") or [None]
                row |= {"iteration": len(curves["step"]), "reward": rewards[-1]}
        return rows

    # ---- figures ----
    def snapshot(self, viewer: Viewer) -> dict[str, Any]:
        return self._figures

    def _all_figures(self) -> dict[str, Any]:
        return {
            "now_s": round(self._end_s, 3),
            "lanes": len(self.timeline.lanes()),
            "title": self._name,
            "jobs": [_without_private_fields(row) for row in self._jobs.values()],
            "problems": [],
            "pools": {},
            "nodes": [],
            "weights": [],
            "gauges": {"busy": self._busy()},
            "slack": self._slack(),
        }

    def _busy(self) -> float:
        """The busy share of all lanes' time."""
        lanes = self.timeline.lanes()
        rented_s = sum(self._rental_s(lane) for lane in lanes)
        worked_s = sum(
            lane.ends_s[place] - lane.starts_s[place]
            for lane in lanes
            for place in range(len(lane.starts_s))
            if lane.kinds[place] != TAIL
        )
        return round(worked_s / max(rented_s, 1e-9), 4)

    def _rental_s(self, lane: TimelineLane) -> float:
        return sum((self._end_s if end_s is None else end_s) - s for s, end_s in lane.rented_s)

    def _slack(self) -> list[dict[str, Any]]:
        """Device hours of the shared nodes, against separate nodes for each job."""
        nodes = [lane for lane in self.timeline.lanes() if _is_node(lane)]
        if not nodes:
            return []
        used_s = sum(self._rental_s(lane) for lane in nodes)
        alone_s = sum(row.get("alone_s", 0.0) for row in self._jobs.values())
        detail = "phases as recorded, on separate nodes for each job, without switches"
        hours = (alone_s / 3600.0, used_s / 3600.0)
        return [slack_row("phases", "device h", hours[0], hours[1], detail)]

    def _row(self, job: str) -> dict[str, Any]:
        if job not in self._jobs:
            raise NotFoundError(f"job: {job[:200]!r} is not in this recording")
        return self._jobs[job]

    async def job(self, viewer: Viewer, job: str) -> dict[str, Any]:
        row = self._row(job)
        facts = _without_private_fields(row) | {"trajectories": [], "checkpoints": [], "curves": {}}
        if (folder := row.get("folder")) is not None:
            run = _run_folder(folder)
            facts["curves"] = read_curves(run / "metrics.jsonl")
            checkpoint = read_object(run / "checkpoint.json")
            if checkpoint:
                path, step = str(checkpoint.get("state_path")), checkpoint["steps_done"]
                facts["checkpoints"] = [{"path": path, "kind": "state", "step": step}]
        return facts

    async def conversation(self, viewer: Viewer, job: str, trajectory: str) -> dict[str, Any]:
        raise NotFoundError("trajectory: a recording keeps no tokens")

    def logs(self, viewer: Viewer, job: str, place: int) -> dict[str, Any]:
        folder = self._row(job).get("folder")
        if folder is None:
            return {"text": "", "place": 0, "over": True}
        place, output = DriverFiles(folder).read_log(place, _LOG_BYTES)
        return {"text": output.decode(errors="replace"), "place": place, "over": True}

    def stop(self, viewer: Viewer, job: str) -> dict[str, Any]:
        raise RefusedError("this is a recording; its jobs cannot be stopped or resumed")

    resume = stop

    def planner_fleet(self, viewer: Viewer) -> PlannedFleet:
        jobs = [_planner_job(row) for row in self._jobs.values()]
        known = tuple(job for job in jobs if job is not None)
        if not known:
            raise RefusedError("this recording has no job that both rolls out and trains")
        lanes = self.timeline.lanes()
        names = [lane.pool for lane in lanes if _is_node(lane)] or [lane.pool for lane in lanes]
        train = sum(name.startswith("train") for name in names)
        return PlannedFleet(max(len(names) - train, 1), max(train, 1), jobs=known)


def _find_run(run: Path) -> tuple[Path | None, dict[str, Path]]:
    """The trace of a run, if it has one, and its jobs' folders by name."""
    if run.is_file():
        return run, {}
    if not run.is_dir():
        fix = "must be a trace, or the folder of a demo, a service or a training run"
        raise ConfigError.of("RUN", str(run), fix)
    newest = [
        path
        for service in (run / "service", run)
        for path in sorted((service / "timelines").glob("run-*.json"))[-1:]
    ]
    trace = next((path for path in (*newest, run / "timeline.json") if path.is_file()), None)
    folders = {
        folder.name: folder
        for place in (run / "jobs", run / "service" / "jobs")
        for folder in _driver_folders(place)
    }
    if (run / "metrics.jsonl").is_file():
        folders[run.name] = run
    if trace is None and not folders:
        fix = "holds no timelines, no jobs and no metrics.jsonl"
        raise ConfigError.of("RUN", str(run), fix)
    return trace, folders


def _is_node(lane: TimelineLane) -> bool:
    """Whether the lane is a node of the co-scheduler, not an engine or a trainer."""
    return lane.pool.endswith("nodes")


def _driver_folders(place: Path) -> list[Path]:
    """Folders of drivers, one or two levels down: a job's name may contain its tenant."""
    found = [path.parent for path in (*place.glob("*/run"), *place.glob("*/*/run"))]
    return sorted(found)


def _run_folder(folder: Path) -> Path:
    return folder / "run" if (folder / "run").is_dir() else folder


def _empty_row(job: str) -> dict[str, Any]:
    return {"job": job, "stage": "recorded", "reason": "", "iterations_done": 0, "device_s": 0.0}


def _job_row(
    job: str, by_kind: dict[int, dict[str, list[float]]], first_s: float, last_s: float
) -> dict[str, Any]:
    def wall_s(kind: int) -> float:
        """Time on the busiest lane: the others did the same at the same time."""
        return max((sum(each) for each in by_kind.get(kind, {}).values()), default=0.0)

    def typical(kind: int) -> tuple[float, int]:
        lanes = by_kind.get(kind, {})
        every = [length for each in lanes.values() for length in each]
        return (statistics.median(every) if every else 0.0), len(lanes)

    parts = {name: wall_s(kind) for kind, name in enumerate(KINDS) if name != "fault"}
    spent_s = sum(parts.values())
    rollout_s, rollout_lanes = typical(ROLLOUT)
    train_s, train_lanes = typical(TRAIN)
    trained = by_kind.get(TRAIN, {})
    done = max((len(each) for each in trained.values()), default=0)
    used_s = sum(sum(each) for lanes in by_kind.values() for each in lanes.values())
    breakdown = {name: round(s, 1) for name, s in parts.items() if s}
    return _empty_row(job) | {
        "iterations_done": done,
        "device_s": round(used_s, 1),
        "began_s": round(first_s, 1),
        "age_s": round(last_s - first_s, 1),
        "breakdown": breakdown | {"queued": round(max(last_s - first_s - spent_s, 0.0), 1)},
        "lengths": (rollout_s, train_s, rollout_lanes, train_lanes),
        "alone_s": (parts["rollout"] + parts["train"]) * (rollout_lanes + train_lanes),
    }


def _without_private_fields(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in row.items() if name not in ("folder", "lengths", "alone_s")
    }


def _planner_job(row: dict[str, Any]) -> PlannedJob | None:
    rollout_s, train_s, *_ = row.get("lengths", (0.0, 0.0))
    if rollout_s <= 0 or train_s <= 0:
        return None
    return PlannedJob(row["job"], rollout_s, train_s, sync_s=0.0, slo=_DEFAULT_SLO)
