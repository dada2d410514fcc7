"""What the job book asks for. The last two are for the driver book, and stay inside the brain."""

from dataclasses import dataclass

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobStage


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """Find out what one cycle of the job takes, and say `JobProfiled`."""

    job: JobId
    terms: JobTerms


@dataclass(frozen=True, slots=True)
class PlaceJob:
    """Find nodes for the job, which has made so many iterations, and say `JobAnswered`. One without terms takes what there is."""

    job: JobId
    profile: JobProfile | None
    iterations_done: int
    crashes: int
    terms: JobTerms | None = None


@dataclass(frozen=True, slots=True)
class DriverMayRun:
    """The job has a place, or is being profiled: its driver is to run, if it does not."""

    job: JobId


@dataclass(frozen=True, slots=True)
class DriverMustEnd:
    """The job is over: so is its driver."""

    job: JobId
    stage: JobStage
    reason: str


JobCommand = ProfileJob | PlaceJob | DriverMayRun | DriverMustEnd
