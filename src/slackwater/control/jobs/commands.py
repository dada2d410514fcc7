"""What the job book asks for, and tells the driver book."""

from slackwater.control.jobs.driver_events import DriverDue, DriverUndue
from slackwater.control.message import Message
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobTerms


class ProfileJob(Message, frozen=True):
    """Find out what one cycle of the job takes, and say `JobProfiled`."""

    job: JobId
    terms: JobTerms


class PlaceJob(Message, frozen=True):
    """Find nodes for the job, which has made so many iterations, and say `JobAnswered`.

    One without terms takes what there is. One that is `driven` is started when it has a place.
    """

    job: JobId
    profile: JobProfile | None
    iterations_done: int
    crashes: int
    terms: JobTerms | None = None
    driven: bool = False


JobCommand = ProfileJob | PlaceJob | DriverDue | DriverUndue
