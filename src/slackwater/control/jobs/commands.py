"""What the job book asks for."""

from dataclasses import dataclass

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """Run the job alone for a cycle or two, and say `JobProfiled`."""

    job: JobId


@dataclass(frozen=True, slots=True)
class PlaceJob:
    """Find nodes for the job, which has made so many iterations, and say `JobAnswered`."""

    job: JobId
    profile: JobProfile | None
    iterations_done: int
    crashes: int


JobCommand = ProfileJob | PlaceJob
