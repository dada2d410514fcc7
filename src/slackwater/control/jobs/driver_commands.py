"""Commands of the driver registry. `KeepDriver` is durable before `StartDriver` is executed."""

from slackwater.control.jobs.events import JobCrashed, JobEnded, JobSubmitted
from slackwater.control.message import Message
from slackwater.control.timer import SetTimer
from slackwater.model.ids import JobId
from slackwater.model.job_life import JobStage


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
