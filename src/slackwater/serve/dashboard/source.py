"""The source of the dashboard's figures: a running service or a recorded run."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from slackwater.serve.dashboard.browser_sessions import Viewer
from slackwater.timeline.lanes import LaneTimeline


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
    jobs: tuple[PlannedJob, ...] = field(default=())


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
