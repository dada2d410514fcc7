"""What can happen to jobs. Plain data, so that a record of it can be replayed."""

from typing import Literal

from slackwater.control.message import TimedMessage
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobAccount, JobStage


class JobSubmitted(TimedMessage, frozen=True):
    """A run begins, or resumes at its last complete iteration; with terms and no profile it is
    profiled first. Without terms (a session) it shares what there is. A `driven` job has a driver
    that the service runs, and ends with that.
    """

    job: JobId
    tenant: TenantId
    profile: JobProfile | None = None
    terms: JobTerms | None = None
    iterations_done: int = 0
    driven: bool = False


class JobProfiled(TimedMessage, frozen=True):
    """What one cycle of the job takes is known."""

    job: JobId
    profile: JobProfile


class JobAnswered(TimedMessage, frozen=True):
    """Placement's answer: it has a place, or waits for one, or never gets one."""

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
    """The job made one more complete iteration: a crash brings it back here."""

    job: JobId


class JobCrashed(TimedMessage, frozen=True):
    """Its processes or its nodes are gone: it is a new arrival at its last complete iteration."""

    job: JobId
    reason: str


class JobEnded(TimedMessage, frozen=True):
    """Nothing more will come of it."""

    job: JobId
    outcome: Literal["finished", "failed", "stopped"]
    reason: str = ""


class JobAdopted(TimedMessage, frozen=True):
    """A job from the durable store: how it ended, if it has, and its account so far."""

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
    """The program whose job it is lives."""

    job: JobId


class IdleJobsSought(TimedMessage, frozen=True):
    """Unattended jobs end after a period of silence; those in `attended` have a client."""

    attended: frozenset[JobId] = frozenset()


ProgressEvent = JobProfiled | JobAnswered | IterationDone | JobCrashed | JobEnded
UsageEvent = TurnOpened | TurnClosed | JobTrained
JobEvent = JobSubmitted | JobAdopted | ProgressEvent | UsageEvent | JobHeard | IdleJobsSought

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in JobEvent.__args__}
