"""Events of jobs. Plain data: a record of them can be replayed."""

from typing import Literal

from slackwater.control.message import TimedMessage
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobAccount, JobStage


class JobSubmitted(TimedMessage, frozen=True):
    """A run begins, or resumes at its last complete iteration. With terms and no profile it is
    profiled first. Without terms (a session) it shares what there is. A `driven` job has a driver
    that the service runs, and ends with it.
    """

    job: JobId
    tenant: TenantId
    profile: JobProfile | None = None
    terms: JobTerms | None = None
    iterations_done: int = 0
    driven: bool = False


class JobProfiled(TimedMessage, frozen=True):
    """One cycle of the job has been measured."""

    job: JobId
    profile: JobProfile


class JobAnswered(TimedMessage, frozen=True):
    """The answer of placement: the job has a place, waits for one, or never gets one."""

    job: JobId
    answer: Literal["placed", "held", "refused"]
    reason: str = ""


class JobTrained(TimedMessage, frozen=True):
    """A trainer ran an operation of the job; an optimizer's step `ends_step`."""

    job: JobId
    trainer_s: float
    waited_s: float = 0.0
    ends_step: bool = False


class IterationDone(TimedMessage, frozen=True):
    """The job completed an iteration: after a crash it resumes here."""

    job: JobId


class JobCrashed(TimedMessage, frozen=True):
    """Its processes or nodes are lost: it is a new arrival at its last complete iteration."""

    job: JobId
    reason: str


class JobEnded(TimedMessage, frozen=True):
    """The job is over."""

    job: JobId
    outcome: Literal["finished", "failed", "stopped"]
    reason: str = ""


class JobAdopted(TimedMessage, frozen=True):
    """A job from the durable store, with its account so far and how it ended, if it has."""

    job: JobId
    tenant: TenantId
    account: JobAccount
    stage: JobStage = JobStage.STOPPED
    reason: str = ""
    iterations_done: int = 0
    crashes: int = 0
    terms: JobTerms | None = None
    driven: bool = False


class JobHeard(TimedMessage, frozen=True):
    """A heartbeat of the job's program."""

    job: JobId


class IdleJobsSought(TimedMessage, frozen=True):
    """End jobs that were silent for long, except those in `attended`, which have a client."""

    attended: frozenset[JobId] = frozenset()


ProgressEvent = JobProfiled | JobAnswered | IterationDone | JobCrashed | JobEnded
UsageEvent = TurnOpened | TurnClosed | JobTrained
JobEvent = JobSubmitted | JobAdopted | ProgressEvent | UsageEvent | JobHeard | IdleJobsSought
