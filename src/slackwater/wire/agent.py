"""Messages between a node's agent and the control plane; they contain no file paths."""

from typing import Annotated, TypeAlias

import msgspec

from slackwater.model.device import Device
from slackwater.model.ids import WorkerId
from slackwater.model.payload import Payload
from slackwater.wire.frames import Message

# In the environment of a process that must not outlive its parent: the parent's process id.
PARENT = "SLACKWATER_PARENT"

# In the environment of workers whose agent forwards eviction notices. A batch scheduler signals
# every process of the node, and the workers must not exit before their turns have moved.
NOTICED = "SLACKWATER_NOTICED"

# In the environment of workers and agents: their key, and the SHA-256 of the control plane's
# certificate unless it listens on the loopback.
SECRET = "SLACKWATER_WORKER_SECRET"
PIN = "SLACKWATER_HUB_PIN"

# In the environment of workers: for how many seconds they outlive a lost control plane.
GRACE = "SLACKWATER_GRACE_S"

# In the environment of each rank of a deployment that has several; rank 0 alone dials in.
RANK = "SLACKWATER_RANK"
WORLD_SIZE = "SLACKWATER_WORLD_SIZE"
RENDEZVOUS = "SLACKWATER_RENDEZVOUS"
LAYOUT = "SLACKWATER_LAYOUT"


AGENT_PREFIX = "agent:"


def agent_name(node: str) -> WorkerId:
    """The name under which a node's agent connects."""
    return WorkerId(f"{AGENT_PREFIX}{node}")


class StatePlace(msgspec.Struct, frozen=True):
    """HOST:PORT where a node receives states; with `pin`, its certificate's SHA-256, by TLS."""

    address: str
    pin: str | None = None


class StartWorker(Message, frozen=True):
    """Run `python -m module arguments` as a worker; its output goes to the log called `log`.

    `key` goes into the worker's environment; the worker proves it to the control plane. One process
    is started for each of the `devices` and sees only that one; all end when one ends. With
    `one_process` one process sees all devices; without devices, it sees what the agent sees. When
    the control plane is lost, the worker reconnects for `grace_s` and then exits.
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
    """A running worker of an agent that reconnects."""

    order: StartWorker
    pid: int


class NodeFacts(msgspec.Struct, frozen=True):
    """An agent's description of its node. `pool` is the node's pool in the fleet file, if any.

    `relay` is HOST:PORT of its weight relay, `certificate` that relay's (PEM), `site` the name of
    the node's fast network, `states` where its state manager receives states, if it has one, and
    `devices` all that it offers. `running` are workers that may be adopted.
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
    """Fetch a payload from the relay of `source`, which has this address and certificate."""

    payload: Payload
    source: str
    address: str
    certificate: str


class OfferPayload(Message, frozen=True):
    """Let the relay with this certificate fetch a payload from the node's weight relay."""

    payload: Payload
    certificate: str


class DropPayload(Message, frozen=True):
    """Drop a payload from the node's weight relay."""

    payload: Payload


class PayloadArrived(Message, frozen=True):
    """The node's weight relay has all of a payload."""

    payload: Payload


class PayloadFailed(Message, frozen=True):
    """The node's weight relay could not get a payload from `source`."""

    payload: Payload
    source: str
    error: str


class PrefetchStates(Message, frozen=True):
    """States needed next on the node's devices, in order; `holding` are needed now."""

    models: list[str]
    holding: list[str] = msgspec.field(default_factory=list)


class SendState(Message, frozen=True):
    """Send a model's state to another node's memory, proving `key`; answered by `StateSent`."""

    move: int
    model: str
    to: StatePlace
    key: str


class TakeState(Message, frozen=True):
    """Accept a state of the model from the sender that proves `key`."""

    model: str
    key: str


class StateSent(Message, frozen=True):
    """The result of a `SendState`; without an error the state has arrived."""

    move: int
    model: str
    error: str = ""


class ForgetStates(Message, frozen=True):
    """Drop states of the model that no worker of the node has."""

    model: str


class SignalWorker(Message, frozen=True):
    """Signal a worker's process, if it still runs."""

    worker: str
    number: int


class WorkerStarted(Message, frozen=True):
    """A worker's process was started; the worker connects to the control plane itself."""

    worker: str
    pid: int


class WorkerNotStarted(Message, frozen=True):
    """A worker's process could not be started."""

    worker: str
    error: str


class WorkerEnded(Message, frozen=True):
    """A worker's process ended, by a signal if `status` is below 0; `said` is its last log line."""

    worker: str
    status: int
    said: str = ""


class NodeLeaving(Message, frozen=True):
    """The node is removed in `leaves_in_s`, at most a day; until then its turns can move."""

    leaves_in_s: Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]


WorkerOrder: TypeAlias = StartWorker | SignalWorker
PayloadOrder: TypeAlias = FetchPayload | OfferPayload | DropPayload
StateOrder: TypeAlias = PrefetchStates | SendState | TakeState | ForgetStates
ToAgent: TypeAlias = WorkerOrder | PayloadOrder | StateOrder

WorkerReport: TypeAlias = WorkerStarted | WorkerNotStarted | WorkerEnded
FromAgent: TypeAlias = PayloadArrived | PayloadFailed | StateSent | WorkerReport | NodeLeaving
