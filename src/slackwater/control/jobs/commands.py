"""Commands of the job registry, to the phase controller and the driver registry."""

from slackwater.control.jobs.driver_events import DriverDue, DriverUndue
from slackwater.control.message import Message
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobTerms


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
