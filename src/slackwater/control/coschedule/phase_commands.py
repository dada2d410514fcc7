"""Commands of the phase controller, beside those of the co-scheduler."""

from slackwater.control.message import Message
from slackwater.control.operations.events import OpsGated
from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase


class PermitGiven(Message, frozen=True):
    """A phase begins. With `asked` the job's own code waits for the permit."""

    job: JobId
    permit: int
    phase: Phase
    iteration: int
    nodes: tuple[NodeId, ...]
    switch: bool
    asked: bool


class PermitEnded(Message, frozen=True):
    """A phase is over. `lost` says why, if it did not end by itself; the job is told."""

    job: JobId
    permit: int
    lost: str = ""


class PermitShrunk(Message, frozen=True):
    """The rollout's last turns continue on a few instances; the rest of its nodes go to the next
    job.
    """

    job: JobId
    permit: int


PhaseCommand = OpsGated | PermitGiven | PermitEnded | PermitShrunk
