"""The source of the dashboard's figures: a running service or a recorded run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from slackwater.serve.dashboard.browser_sessions import Viewer
from slackwater.timeline.lanes import LaneTimeline

_MAX_BYTES = 16 << 20
_MAX_POINTS = 600


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A current job as input of `slackwater plan`: its phase times alone, and its SLO."""

    job: str
    rollout_s: float
    train_s: float
    sync_s: float
    slo: float
    rollout_nodes: int = 1
    train_nodes: int = 1
    rollout_state_gb: float = 0.0
    train_state_gb: float = 0.0
    model_billions: float = 0.001


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """Nodes and jobs as input of `slackwater plan`; `rollout_nodes` includes `spot_nodes`."""

    rollout_nodes: int
    train_nodes: int
    spot_nodes: int = 0
    host_memory_gb: float = 16.0
    placement: str = "group"
    jobs: tuple[PlannedJob, ...] = ()


class DashboardSource(Protocol):
    """Every method shows or changes only what the viewer may see."""

    mode: Literal["live", "recording"]
    timeline: LaneTimeline

    def viewer(self, key: str) -> Viewer | None: ...

    def now_s(self) -> float: ...

    def is_closing(self) -> bool: ...

    def sees(self, viewer: Viewer, job: str) -> bool: ...

    def snapshot(self, viewer: Viewer) -> dict[str, Any]: ...

    async def job(self, viewer: Viewer, job: str) -> dict[str, Any]: ...

    async def conversation(self, viewer: Viewer, job: str, trajectory: str) -> dict[str, Any]: ...

    def logs(self, viewer: Viewer, job: str, place: int) -> dict[str, Any]: ...

    def stop(self, viewer: Viewer, job: str) -> dict[str, Any]: ...

    def resume(self, viewer: Viewer, job: str) -> dict[str, Any]: ...

    def planner_fleet(self, viewer: Viewer) -> PlannedFleet: ...


def read_curves(path: Path) -> dict[str, list[float | None]]:
    """A job's curves from the `metrics.jsonl` of its run's folder, thinned for a chart: series by
    name, all of one length, with `step`; empty if there is no file.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _MAX_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return {}
    rows = [row for line in lines if (row := _row(line)) is not None]
    rows = rows[:: max(-(-len(rows) // _MAX_POINTS), 1)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_number(row.get(name)) for row in rows] for name in names}


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None  # a partial line: the driver is writing it, or was killed
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _number(value: Any) -> float | None:
    is_finite = isinstance(value, int | float) and abs(value) < float("inf")
    return round(float(value), 6) if is_finite else None
