"""Events of the drivers of submitted jobs."""

from slackwater.control.jobs.events import IterationDone
from slackwater.control.message import TimedMessage
from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobStage


class DriverSubmitted(TimedMessage, frozen=True):
    """A job with a driver was submitted and is stored."""

    job: JobId
    tenant: TenantId
    terms: JobTerms
    profile: JobProfile | None = None


class DriverAdopted(TimedMessage, frozen=True):
    """A submitted job from the durable store. `attempt` processes were started; the last one may
    still live. `over` is how the job ended, if it has.
    """

    job: JobId
    tenant: TenantId
    terms: JobTerms
    profile: JobProfile | None = None
    attempt: int = 0
    crashes: int = 0
    lives: bool = False
    over: JobStage | None = None


class DriverDue(TimedMessage, frozen=True):
    """Its job has a place: the driver may start."""

    job: JobId


class DriverUndue(TimedMessage, frozen=True):
    """Its job is over: the driver must end."""

    job: JobId
    stage: JobStage
    reason: str = ""


class DriverEnded(TimedMessage, frozen=True):
    """The attempt's process has ended, with its exit status if known; `said` is its last output.

    `hopeless`: its input is wrong, so another attempt would end in the same way.
    """

    job: JobId
    attempt: int
    status: int | None
    said: str = ""
    hopeless: bool = False


class StopAsked(TimedMessage, frozen=True):
    """Its owner stops it; its results stay."""

    job: JobId


class ResumeAsked(TimedMessage, frozen=True):
    """Its owner resumes it where it stopped."""

    job: JobId


ArrivalEvent = DriverSubmitted | DriverAdopted
ProgressEvent = DriverDue | DriverUndue | DriverEnded | StopAsked | ResumeAsked
DriverEvent = ArrivalEvent | ProgressEvent | IterationDone | TimerFired
