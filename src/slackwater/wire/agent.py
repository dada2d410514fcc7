"""Messages between a node's agent and the control plane; they hold no paths of another disk."""

from typing import Annotated, TypeAlias

import msgspec

from slackwater.model.device import Device
from slackwater.wire.frames import Message

# In the environment of a process that must not outlive the one that started it: the starter's
# number.
PARENT = "SLACKWATER_PARENT"

# In the environment of workers whose agent passes eviction notices on. A batch scheduler signals
# every process of the node, and the workers must not leave before their turns have moved.
NOTICED = "SLACKWATER_NOTICED"

# In the environment of workers that outlive a lost control plane: for how many seconds.
GRACE = "SLACKWATER_GRACE_S"

# In the environment of each rank of a deployment that has several; rank 0 alone dials in.
RANK = "SLACKWATER_RANK"
WORLD_SIZE = "SLACKWATER_WORLD_SIZE"
RENDEZVOUS = "SLACKWATER_RENDEZVOUS"
LAYOUT = "SLACKWATER_LAYOUT"


class StatePlace(msgspec.Struct, frozen=True):
    """HOST:PORT where a node takes states; encrypted if `pin` is its certificate's SHA-256."""

    address: str
    pin: str | None = None


class StartWorker(Message, frozen=True):
    """Run `python -m module arguments` under a worker's name; its output goes to the log called
    `log`.

    `key` is what the worker proves to the control plane; it goes into its environment. A process is
    started for each of the `devices` and sees that one alone; all end when one ends. With
    `one_process` one is started that sees them all; without devices, one that sees what the agent
    sees. It dials again for `grace_s` when the control plane is lost; without, it exits.
    """

    worker: str
    log: str
    module: str
    arguments: list[str]
    key: str
    devices: tuple[Device, ...] = ()
    layout: str = ""
    grace_s: float = 0.0
    one_process: bool = False


class RunningWorker(msgspec.Struct, frozen=True):
    """A worker that outlived the connection over which the agent was told to start it."""

    order: StartWorker
    pid: int


class NodeFacts(msgspec.Struct, frozen=True):
    """What an agent says of its node. `pool` is the pool of the fleet file that the node belongs
    to, if there is one.

    `relay` is HOST:PORT of its weight relay and `certificate` what that shows (PEM), `site` the
    name of the fast network that it is on, `states` where it takes states, if it has a state
    manager, `devices` all that it lends. `running` are workers that may be adopted.
    """

    node: str
    pool: str | None = None
    cores: int = 1
    memory_mb: int = 0
    host: str = ""
    pid: int = 0
    relay: str = ""
    certificate: str = ""
    site: str = ""
    states: StatePlace | None = None
    devices: tuple[Device, ...] = ()
    running: tuple[RunningWorker, ...] = ()


class FetchPayload(Message, frozen=True):
    """Let the relay fetch a payload from that of `source`, at this address and certificate."""

    version: str
    base: str
    source: str
    address: str
    certificate: str


class OfferPayload(Message, frozen=True):
    """Let the node's weight relay give a payload to the one that has this certificate."""

    version: str
    base: str
    certificate: str


class DropPayload(Message, frozen=True):
    """Let the node's weight relay forget a payload."""

    version: str
    base: str


class PayloadArrived(Message, frozen=True):
    """The node's weight relay has all of a payload."""

    version: str
    base: str


class PayloadFailed(Message, frozen=True):
    """The node's weight relay could not get a payload from `source`."""

    version: str
    base: str
    source: str
    error: str


class PrefetchStates(Message, frozen=True):
    """States needed next on the node's devices, in order; those of `holding` are needed now."""

    models: list[str]
    holding: list[str] = msgspec.field(default_factory=list)


class SendState(Message, frozen=True):
    """Send a model's state to another node's memory, proving `key`; answered by `StateSent`."""

    move: int
    model: str
    to: StatePlace
    key: str


class TakeState(Message, frozen=True):
    """A state of the model is sent here, by whoever proves `key`."""

    model: str
    key: str


class StateSent(Message, frozen=True):
    """What became of a `SendState`; without an error the state is there."""

    move: int
    model: str
    error: str = ""


class ForgetStates(Message, frozen=True):
    """States of the model that no worker of the node has are of no use any more."""

    model: str


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
    """A worker's process ended: a signal if `status` is below 0; `said` is its log's last line."""

    worker: str
    status: int
    said: str = ""


class NodeLeaving(Message, frozen=True):
    """The node is taken away in `leaves_in_s`, within a day; until then its turns can move."""

    leaves_in_s: Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]


WorkerOrder: TypeAlias = StartWorker | SignalWorker
PayloadOrder: TypeAlias = FetchPayload | OfferPayload | DropPayload
StateOrder: TypeAlias = PrefetchStates | SendState | TakeState | ForgetStates
ToAgent: TypeAlias = WorkerOrder | PayloadOrder | StateOrder

WorkerReport: TypeAlias = WorkerStarted | WorkerNotStarted | WorkerEnded
FromAgent: TypeAlias = PayloadArrived | PayloadFailed | StateSent | WorkerReport | NodeLeaving
