"""Placements: a job's group and nodes, and the order of a group's phases."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from slackwater.model.ids import GroupId, JobId, NodeId


class Phase(StrEnum):
    """A part of an iteration that runs on one pool."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    SYNC = "sync"


class Strategy(StrEnum):
    """How a placement chose its nodes."""

    PACK = "pack"  # into nodes that are already paid for
    SCALE = "scale"  # shares train nodes, adds rollout nodes
    ISOLATE = "isolate"  # a new group
    COLOCATE = "colocate"  # all phases on train nodes


@dataclass(frozen=True, slots=True)
class PhaseSlot:
    """One phase in a group's cycle, `start_s` after the start of the cycle in the worst case."""

    job: JobId
    phase: Phase
    nodes: tuple[NodeId, ...]
    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A cyclic order of phases that a group repeats; in the worst case a cycle takes `period_s`.

    A job may have several slots of each phase in one cycle. On every node phases run in slot order,
    and shorter phases only start others earlier, so worst-case lengths bound every cycle.
    """

    period_s: float
    slots: tuple[PhaseSlot, ...]

    def rounds(self, job: JobId) -> int:
        """Iterations of `job` in one cycle."""
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

    def uses(self, place: NodeId) -> bool:
        """Whether it has devices of a node, or of a part of a node."""
        return any(overlap(place, own) for own in (*self.rollout_nodes, *self.train_nodes))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job cannot be placed now; `final` if it never can be on this fleet."""

    job: JobId
    reason: str
    final: bool


@cache
def node_of(place: NodeId) -> NodeId:
    """The node of a place: `train-0/2-3` is devices 2 and 3 of `train-0`, `train-0` all of it."""
    return NodeId(place.partition("/")[0])


@cache
def place_devices(place: NodeId) -> range | None:
    """Device numbers of a place on its node; None: all."""
    _, part, numbers = place.partition("/")
    if not part:
        return None
    first, _, last = numbers.partition("-")
    return range(int(first), int(last or first) + 1)


def place_on(node: NodeId, first: int, devices: int) -> NodeId:
    last = f"-{first + devices - 1}" if devices > 1 else ""
    return NodeId(f"{node}/{first}{last}")


@cache
def overlap(one: NodeId, other: NodeId) -> bool:
    if one == other or node_of(one) != node_of(other):
        return one == other
    mine, others = place_devices(one), place_devices(other)
    return mine is None or others is None or bool(set(mine) & set(others))


@cache
def is_within(place: NodeId, other: NodeId) -> bool:
    if place == other or node_of(place) != node_of(other):
        return place == other
    mine, others = place_devices(place), place_devices(other)
    return others is None or (mine is not None and set(mine) <= set(others))
