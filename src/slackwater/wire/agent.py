"""What a node's agent and the control plane say to each other. Nothing in it is a path of somebody else's disk."""

import msgspec

from slackwater.wire.message import Message


class NodeFacts(msgspec.Struct, frozen=True):
    """What an agent says of its node. `pool` is the pool of the fleet file that the node belongs to, if there is one."""

    node: str
    pool: str | None = None
    cores: int = 1
    memory_mb: int = 0
    host: str = ""
    pid: int = 0


class StartWorker(Message, frozen=True):
    """Run `python -m module arguments` under a worker's name; its output goes to the log called `log`."""

    worker: str
    log: str
    module: str
    arguments: list[str]


class SignalWorker(Message, frozen=True):
    """Send a signal to a worker's process, if it still runs."""

    worker: str
    number: int


class WorkerStarted(Message, frozen=True):
    """A worker's process runs; it connects to the control plane by itself."""

    worker: str
    pid: int


class WorkerNotStarted(Message, frozen=True):
    """A worker's process could not be started."""

    worker: str
    error: str


class WorkerEnded(Message, frozen=True):
    """A worker's process has ended; a negative status is the signal that ended it.

    `said` is the last line of its log, if it ended badly.
    """

    worker: str
    status: int
    said: str = ""
