"""Events of the co-scheduler. Plain data: a record of them can be replayed.

`epoch` counts a job's placements, and a permit's number is used once. A message with an old epoch,
or with a permit that nobody holds any more, came late or twice and is ignored.
"""

from dataclasses import dataclass

from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Phase


@dataclass(frozen=True, slots=True)
class JobArrived:
    """A new job, or one that recovered from its `crashes`-th crash: then `iterations_done` are in
    its checkpoint. If `others_follow` in the same instant, it starts after the last of them.
    """

    now_s: float
    spec: JobSpec
    iterations_done: int = 0
    crashes: int = 0
    others_follow: bool = False


@dataclass(frozen=True, slots=True)
class ProfilingAsked:
    """A job without a profile is to run unprofiled, on so many nodes or devices, until `JobArrived`
    brings its profile.
    """

    now_s: float
    job: JobId
    rollout_nodes: int
    train_nodes: int
    rollout_devices: int = 0
    train_devices: int = 0


@dataclass(frozen=True, slots=True)
class PhaseRequested:
    """A job's state is loaded and its next phase waits for a permit."""

    now_s: float
    job: JobId
    epoch: int
    phase: Phase
    iteration: int


@dataclass(frozen=True, slots=True)
class JobRests:
    """A placed job has asked for nothing since its last phase: its turn can be skipped."""

    now_s: float
    job: JobId
    epoch: int


@dataclass(frozen=True, slots=True)
class JobYields:
    """A placed job has asked for nothing for a long time: it loses its place to a held job, and may
    arrive again.
    """

    now_s: float
    job: JobId
    epoch: int


@dataclass(frozen=True, slots=True)
class TailReached:
    """So many responses of a rollout are done that the rest fits on a few devices."""

    now_s: float
    job: JobId
    permit: int


@dataclass(frozen=True, slots=True)
class PhaseFinished:
    """A phase ended by itself, or was preempted (`cut`) and resumes with the job's next permit.

    `work_s` is what its work takes on the nodes of the job's profile, without a switch; 0 if it was
    skipped or cut. `step_s` is the longest stretch of it that could not be preempted; 0 means all.
    """

    now_s: float
    job: JobId
    permit: int
    work_s: float
    cut: bool = False
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobFinished:
    """A job completed its last iteration."""

    now_s: float
    job: JobId
    epoch: int


@dataclass(frozen=True, slots=True)
class JobCrashReported:
    """A job's processes died. It may return with `JobArrived`."""

    now_s: float
    job: JobId
    epoch: int


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is lost, with the state of every job that is pinned to it."""

    now_s: float
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
