"""What can happen to jobs. Plain data, so that a record of it can be replayed."""

from dataclasses import dataclass
from typing import Literal

from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobAccount, JobStage


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """An owner's run begins, or resumes at its last complete iteration. One with terms and without
    a profile is profiled first.

    One without terms (a session that nobody submitted) shares what there is. One that is `driven`
    has a driver that the service runs, and ends with that.
    """

    now_s: float
    job: JobId
    tenant: TenantId
    profile: JobProfile | None = None
    terms: JobTerms | None = None
    iterations_done: int = 0
    driven: bool = False


@dataclass(frozen=True, slots=True)
class JobProfiled:
    """What one cycle of the job takes is known."""

    now_s: float
    job: JobId
    profile: JobProfile


@dataclass(frozen=True, slots=True)
class JobAnswered:
    """Placement's answer: it has a place, or waits for one, or never gets one."""

    now_s: float
    job: JobId
    answer: Literal["placed", "held", "refused"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobTrained:
    """A trainer ran an operation of the job; an optimizer's step `ends_step`."""

    now_s: float
    job: JobId
    trainer_s: float
    waited_s: float = 0.0
    ends_step: bool = False


@dataclass(frozen=True, slots=True)
class IterationDone:
    """The job made one more complete iteration: a crash brings it back here."""

    now_s: float
    job: JobId


@dataclass(frozen=True, slots=True)
class JobCrashed:
    """Its processes or its nodes are gone: it is a new arrival at its last complete iteration."""

    now_s: float
    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Nothing more will come of it."""

    now_s: float
    job: JobId
    outcome: Literal["finished", "failed", "stopped"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobAdopted:
    """A job from the durable store: how it ended, if it has, and its account so far."""

    now_s: float
    job: JobId
    tenant: TenantId
    account: JobAccount
    stage: JobStage = JobStage.STOPPED
    reason: str = ""
    iterations_done: int = 0
    crashes: int = 0
    terms: JobTerms | None = None
    driven: bool = False


@dataclass(frozen=True, slots=True)
class JobHeard:
    """The program whose job it is lives."""

    now_s: float
    job: JobId


@dataclass(frozen=True, slots=True)
class IdleJobsSought:
    """Jobs that nobody attends end once nothing was heard of them for a while; those in `attended`
    have a client.
    """

    now_s: float
    attended: frozenset[JobId] = frozenset()


JobEvent = (
    JobSubmitted
    | JobProfiled
    | JobAnswered
    | TurnOpened
    | TurnClosed
    | JobTrained
    | IterationDone
    | JobCrashed
    | JobEnded
    | JobAdopted
    | JobHeard
    | IdleJobsSought
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in JobEvent.__args__}
