"""Events of phases, from jobs' own code and from operations. Plain data: a record of them can be
replayed.
"""

from dataclasses import dataclass

from slackwater.control.operations.events import ModelAdopted, OpSubmitted
from slackwater.control.operations.facts import OpEnded, PublishDetached
from slackwater.model.ids import JobId
from slackwater.model.placement import Phase


@dataclass(frozen=True, slots=True)
class PermitAsked:
    """A job's own code waits to begin a phase. `known_as` is the number of the permit that it held
    before the control plane restarted.
    """

    now_s: float
    job: JobId
    phase: Phase
    iteration: int
    known_as: int | None = None


@dataclass(frozen=True, slots=True)
class PermitProgress:
    """The holder is alive, and `finished` of its `total` responses are done."""

    now_s: float
    job: JobId
    permit: int
    finished: int = 0
    total: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class PermitReturned:
    """The phase is over; its work took `work_s`."""

    now_s: float
    job: JobId
    permit: int
    work_s: float


@dataclass(frozen=True, slots=True)
class PermitsNumbered:
    """Permits up to this number were granted before the control plane restarted."""

    now_s: float
    after: int


JobPhaseEvent = PermitAsked | PermitProgress | PermitReturned | PublishDetached | OpEnded
PhaseEvent = JobPhaseEvent | PermitsNumbered | OpSubmitted | ModelAdopted

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in PhaseEvent.__args__}
