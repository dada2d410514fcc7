"""Where the dashboard's figures come from: a running service, or a recorded run."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from slackwater.serve.dashboard.browser_sessions import Viewer
from slackwater.timeline.lanes import LaneTimeline


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A current job as `slackwater plan` reads it: what an iteration takes alone, and its SLO."""

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
    """The nodes that current jobs share, and the policy that places them; `spot_nodes` are those of
    `rollout_nodes` that may go.
    """

    rollout_nodes: int
    train_nodes: int
    spot_nodes: int = 0
    host_memory_gb: float = 16.0
    placement: str = "group"
    jobs: tuple[PlannedJob, ...] = field(default=())


class DashboardSource(Protocol):
    """Everything takes the viewer, and shows or changes only what is the viewer's."""

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
