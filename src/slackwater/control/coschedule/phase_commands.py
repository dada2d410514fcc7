"""What the phase keeper asks its body to do, beside what the co-scheduler says."""

from dataclasses import dataclass

from slackwater.control.operations.events import OpsGated
from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase


@dataclass(frozen=True, slots=True)
class PermitGiven:
    """A phase begins. `asked`: the job's own code waits for it."""

    job: JobId
    permit: int
    phase: Phase
    iteration: int
    nodes: tuple[NodeId, ...]
    switch: bool
    asked: bool


@dataclass(frozen=True, slots=True)
class PermitEnded:
    """A phase is over. With `lost` it did not end by itself: the job is told why."""

    job: JobId
    permit: int
    lost: str = ""


@dataclass(frozen=True, slots=True)
class PermitShrunk:
    """The rollout's last turns go on on a few instances; the rest of its nodes is the next
    job's.
    """

    job: JobId
    permit: int


PhaseCommand = OpsGated | PermitGiven | PermitEnded | PermitShrunk
