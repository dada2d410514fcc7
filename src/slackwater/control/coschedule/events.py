"""Events of the co-scheduler. Plain data: a record of them can be replayed.

`epoch` counts a job's placements, and a permit's number is used once. A message with an old epoch,
or with a permit that nobody holds any more, came late or twice and is ignored.
"""

from slackwater.control.message import TimedMessage
from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Phase


class JobArrived(TimedMessage, frozen=True):
    """A new job, or one that recovered from its `crashes`-th crash: then `iterations_done` are in
    its checkpoint. If `others_follow` in the same instant, it starts after the last of them.
    """

    spec: JobSpec
    iterations_done: int = 0
    crashes: int = 0
    others_follow: bool = False


class ProfilingAsked(TimedMessage, frozen=True):
    """A job without a profile is to run unprofiled, on so many nodes or devices, until `JobArrived`
    brings its profile.
    """

    job: JobId
    rollout_nodes: int
    train_nodes: int
    rollout_devices: int = 0
    train_devices: int = 0


class PhaseRequested(TimedMessage, frozen=True):
    """A job's state is loaded and its next phase waits for a permit."""

    job: JobId
    epoch: int
    phase: Phase
    iteration: int


class JobRests(TimedMessage, frozen=True):
    """A placed job has asked for nothing since its last phase: its turn can be skipped."""

    job: JobId
    epoch: int


class JobYields(TimedMessage, frozen=True):
    """A placed job has asked for nothing for a long time: it loses its place to a held job, and may
    arrive again.
    """

    job: JobId
    epoch: int


class TailReached(TimedMessage, frozen=True):
    """So many responses of a rollout are done that the rest fits on a few devices."""

    job: JobId
    permit: int


class PhaseFinished(TimedMessage, frozen=True):
    """A phase ended by itself, or was preempted (`cut`) and resumes with the job's next permit.

    `work_s` is what its work takes on the nodes of the job's profile, without a switch; 0 if it was
    skipped or cut. `step_s` is the longest stretch of it that could not be preempted; 0 means all.
    """

    job: JobId
    permit: int
    work_s: float
    cut: bool = False
    step_s: float = 0.0


class JobFinished(TimedMessage, frozen=True):
    """A job completed its last iteration."""

    job: JobId
    epoch: int


class JobCrashReported(TimedMessage, frozen=True):
    """A job's processes died. It may return with `JobArrived`."""

    job: JobId
    epoch: int


class NodeLost(TimedMessage, frozen=True):
    """A node is lost, with the state of every job that is pinned to it."""

    node: NodeId


Event = (
    JobArrived
    | ProfilingAsked
    | PhaseRequested
    | JobRests
    | JobYields
    | TailReached
    | PhaseFinished
    | JobFinished
    | JobCrashReported
    | NodeLost
    | TimerFired
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in Event.__args__}
