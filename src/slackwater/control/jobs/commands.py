"""Commands of the job registry, to the phase controller and the driver registry, and of that one.

`KeepDriver` is durable before `StartDriver` is executed.
"""

from slackwater.control.jobs.driver_events import DriverDue, DriverUndue
from slackwater.control.jobs.events import JobCrashed, JobEnded, JobSubmitted
from slackwater.control.message import Message
from slackwater.control.timer import SetTimer
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobStage


class ProfileJob(Message, frozen=True):
    """Measure one cycle of the job; `JobProfiled` follows."""

    job: JobId
    terms: JobTerms


class PlaceJob(Message, frozen=True):
    """Find nodes for the job, which resumes after `iterations_done`; `JobAnswered` follows.

    A job without terms shares what there is. A `driven` job is started when it has a place.
    """

    job: JobId
    profile: JobProfile | None
    iterations_done: int
    crashes: int
    terms: JobTerms | None = None
    driven: bool = False


JobCommand = ProfileJob | PlaceJob | DriverDue | DriverUndue


class KeepDriver(Message, frozen=True):
    """Store the number of attempts, the crashes in a row, and how the job ended if it has."""

    job: JobId
    attempt: int
    crashes: int
    over: JobStage | None
    reason: str


class StartDriver(Message, frozen=True):
    """Start the process of this attempt; `DriverEnded` follows when it has ended."""

    job: JobId
    attempt: int


class EndDriver(Message, frozen=True):
    """Ask its process to exit, then kill it; `DriverEnded` follows."""

    job: JobId
    attempt: int


DriverCommand = (
    KeepDriver | StartDriver | EndDriver | SetTimer | JobSubmitted | JobCrashed | JobEnded
)
