"""What can happen to the drivers of submitted jobs. Plain data, so that a record of it can be
replayed.
"""

from dataclasses import dataclass

from slackwater.control.jobs.events import IterationDone
from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobStage


@dataclass(frozen=True, slots=True)
class DriverSubmitted:
    """A job with a driver was submitted, and the store has it."""

    now_s: float
    job: JobId
    tenant: TenantId
    terms: JobTerms
    profile: JobProfile | None = None


@dataclass(frozen=True, slots=True)
class DriverAdopted:
    """A submitted job from the durable store. `attempt` processes were started for it; `lives` says
    whether the last still runs.

    `over` is how it ended, if it has.
    """

    now_s: float
    job: JobId
    tenant: TenantId
    terms: JobTerms
    profile: JobProfile | None = None
    attempt: int = 0
    crashes: int = 0
    lives: bool = False
    over: JobStage | None = None


@dataclass(frozen=True, slots=True)
class DriverDue:
    """Its job has a place."""

    now_s: float
    job: JobId


@dataclass(frozen=True, slots=True)
class DriverUndue:
    """Its job is over, whoever said so."""

    now_s: float
    job: JobId
    stage: JobStage
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DriverEnded:
    """The process of that attempt is gone. No `status`: nobody saw it end. `said` are its last
    words.

    `hopeless`: the same would come of another attempt, since its input is wrong.
    """

    now_s: float
    job: JobId
    attempt: int
    status: int | None
    said: str = ""
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Its owner wants it to stop; what it has made stays."""

    now_s: float
    job: JobId


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """Its owner wants it to go on from there."""

    now_s: float
    job: JobId


DriverEvent = (
    DriverSubmitted
    | DriverAdopted
    | DriverDue
    | DriverUndue
    | DriverEnded
    | IterationDone
    | TimerFired
    | StopAsked
    | ResumeAsked
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in DriverEvent.__args__}
