"""Events of phases, from jobs' own code and from operations. Plain data: a record of them can be
replayed.
"""

from slackwater.control.message import TimedMessage
from slackwater.control.operations.events import ModelAdopted, OpSubmitted
from slackwater.control.operations.facts import OpEnded, PublishDetached
from slackwater.model.ids import JobId
from slackwater.model.placement import Phase


class PermitAsked(TimedMessage, frozen=True):
    """A job's own code waits to begin a phase. `known_as` is the number of the permit that it held
    before the control plane restarted.
    """

    job: JobId
    phase: Phase
    iteration: int
    known_as: int | None = None


class PermitProgress(TimedMessage, frozen=True):
    """The holder is alive, and `finished` of its `total` responses are done."""

    job: JobId
    permit: int
    finished: int = 0
    total: int = 0
    tokens: int = 0


class PermitReturned(TimedMessage, frozen=True):
    """The phase is over; its work took `work_s`."""

    job: JobId
    permit: int
    work_s: float


class PermitsNumbered(TimedMessage, frozen=True):
    """Permits up to this number were granted before the control plane restarted."""

    after: int


JobPhaseEvent = PermitAsked | PermitProgress | PermitReturned | PublishDetached | OpEnded
PhaseEvent = JobPhaseEvent | PermitsNumbered | OpSubmitted | ModelAdopted

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in PhaseEvent.__args__}
