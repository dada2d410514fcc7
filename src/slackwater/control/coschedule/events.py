"""What can happen to the co-scheduler. Plain data, so that a record of it can be replayed.

`epoch` counts a job's placements, and a permit's number is used once: a message that names an old
epoch or a permit that is no longer held came late or twice, and is ignored.
"""

from dataclasses import dataclass

from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Phase


@dataclass(frozen=True, slots=True)
class JobArrived:
    """A new job, or one that recovered from its `crashes`-th crash: then `iterations_done` are in
    its checkpoint.
    """

    now_s: float
    spec: JobSpec
    iterations_done: int = 0
    crashes: int = 0


@dataclass(frozen=True, slots=True)
class ProfilingAsked:
    """A job whose cycle is not known is to run as a guest, on so many nodes or devices, until
    `JobArrived` brings its profile.
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
    """A placed job has asked for nothing since its last phase: others need not wait for its
    turn.
    """

    now_s: float
    job: JobId
    epoch: int


@dataclass(frozen=True, slots=True)
class JobYields:
    """A placed job has asked for nothing for long: its place goes to another that waits, until it
    arrives again.
    """

    now_s: float
    job: JobId
    epoch: int


@dataclass(frozen=True, slots=True)
class TailReached:
    """So many of a rollout's responses are done that the rest would fit on a few devices."""

    now_s: float
    job: JobId
    permit: int


@dataclass(frozen=True, slots=True)
class PhaseFinished:
    """A phase ended by itself; `work_s` is what its work would take on the nodes of its profile,
    without a switch. One that is `cut` goes on with the job's next permit. `step_s` is the longest
    time in it that could not be cut, where that is not all of it.
    """

    now_s: float
    job: JobId
    permit: int
    work_s: float
    cut: bool = False
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobFinished:
    """A job made its last iteration."""

    now_s: float
    job: JobId
    epoch: int


@dataclass(frozen=True, slots=True)
class JobCrashReported:
    """A job's processes died. It may come back with `JobArrived`."""

    now_s: float
    job: JobId
    epoch: int


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node vanished, with the state of every job that is pinned to it."""

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

EVENT_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        JobArrived,
        ProfilingAsked,
        PhaseRequested,
        JobRests,
        JobYields,
        TailReached,
        PhaseFinished,
        JobFinished,
        JobCrashReported,
        NodeLost,
        TimerFired,
    )
}
