"""Where a job runs: its group, its nodes, and the order in which a group's phases take turns."""

from dataclasses import dataclass
from enum import StrEnum

from slackwater.model.ids import GroupId, JobId, NodeId


class Phase(StrEnum):
    """A run of ops of one job on one pool."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    SYNC = "sync"


class Strategy(StrEnum):
    """How a placement found its nodes."""

    PACK = "pack"  # into nodes that are already paid for
    SCALE = "scale"  # shares train nodes, adds rollout nodes
    ISOLATE = "isolate"  # a new group
    COLOCATE = "colocate"  # all phases on train nodes


@dataclass(frozen=True, slots=True)
class PhaseSlot:
    """One turn of one phase in a group's cycle, `start_s` after the cycle's begin at worst."""

    job: JobId
    phase: Phase
    nodes: tuple[NodeId, ...]
    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A cyclic order of phases that a group repeats: at worst one cycle takes `period_s`.

    A job may have several slots of each phase in one cycle. On every node phases run in slot order,
    and shorter phases only ever start others earlier, so worst-case lengths bound every cycle.
    """

    period_s: float
    slots: tuple[PhaseSlot, ...]

    def rounds(self, job: JobId) -> int:
        """Iterations that `job` makes in one cycle."""
        return sum(1 for slot in self.slots if slot.job == job and slot.phase is Phase.TRAIN)


@dataclass(frozen=True, slots=True)
class Placement:
    """One job pinned to nodes. `plan` is the group's cycle with it, if the policy fixes one."""

    job: JobId
    group: GroupId
    rollout_nodes: tuple[NodeId, ...]
    train_nodes: tuple[NodeId, ...]
    strategy: Strategy
    reason: str
    plan: GroupPlan | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job cannot be placed now; `final` if it never can on this fleet."""

    job: JobId
    reason: str
    final: bool
