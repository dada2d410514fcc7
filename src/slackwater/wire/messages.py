"""Control messages as msgpack: the handshake, and messages to and from engines and trainers.

Those of sandbox workers are in `wire/sandbox.py`, of reward workers in `wire/rewards.py`, of agents
in `wire/agent.py`, of lending in `wire/lending.py`.

Token ids travel as raw u32 bytes; models, versions and saved states are named by URI
(`model/uri.py`), never by path. Each message is a tagged struct; `decode` refuses anything else.
"""

from typing import Literal, TypeAlias

import msgspec

from slackwater.model.adam import Adam
from slackwater.model.payload import Payload
from slackwater.model.sampling import Sampling
from slackwater.model.session import LoraShape
from slackwater.wire import agent, lending
from slackwater.wire.frames import FrameKind, decode_body, encode_frame
from slackwater.wire.frames import Message as Message
from slackwater.wire.rewards import RewardFacts, ToRewards
from slackwater.wire.sandbox import FromSandbox, SandboxFacts, ToSandbox

PROTOCOL = 9


# ---- connection ----
# ConnectRequest -> Challenge -> ChallengeResponse -> Welcome -> Hello. The keys never travel
# (`wire/proof.py`).
class ConnectRequest(Message, frozen=True, forbid_unknown_fields=False):
    """First message of a worker or a node's agent: its name and 32 random bytes.

    Fields of other versions are ignored, so that a version is refused by its protocol number.
    """

    worker: str
    nonce: bytes
    protocol: int = PROTOCOL
    pool: str = ""  # of an agent: the pool that its key is for


class Challenge(Message, frozen=True):
    """The control plane's 32 random bytes, for the proof of the key."""

    nonce: bytes


class ChallengeResponse(Message, frozen=True):
    """The proof of a worker's or agent's key (`proof.peer_proof`)."""

    proof: bytes


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """A proven worker's or agent's description; the first message of protocols before 4."""

    worker: str
    role: Literal["engine", "trainer", "sandbox", "rewards", "agent"]
    engine: "EngineFacts | None" = None
    protocol: int = PROTOCOL
    node: agent.NodeFacts | None = None
    sandbox: SandboxFacts | None = None
    rewards: RewardFacts | None = None


class EngineFacts(msgspec.Struct, frozen=True):
    """An engine's base model, capacity and abilities.

    `max_versions` counts whole sets of weights, `max_adapters` adapters (0: they count as whole
    sets). `kind` is one of `model.instance.InstanceKind`. Without `exact_continuation` it cannot
    continue at a position of a turn's random stream. One that `lends` serves, and accepts
    `lending.LendNode`; a borrowed one belongs to its `job`. `node` is where it runs. One that
    `sleeps` accepts `RestEngine` and `WakeEngine`.
    """

    base_model: str
    max_running: int
    max_context_tokens: int
    kv_tokens: int
    max_versions: int
    kind: Literal["local", "dedicated", "spot", "borrowed"] = "dedicated"
    exact_continuation: bool = True
    max_adapters: int = 0
    lends: bool = False
    job: str | None = None
    node: str = ""
    sleeps: bool = False


class Welcome(Message, frozen=True):
    """The control plane accepts the worker, and proves its own key (`proof.plane_proof`)."""

    heartbeat_every_s: float
    proof: bytes = b""


class HelloRefused(Message, frozen=True):
    """The control plane refuses the peer and closes. `again`: a later attempt may succeed."""

    reason: str
    again: bool = False


class Heartbeat(Message, frozen=True):
    """The worker lives, with these gauges."""

    gauges: dict[str, float] = msgspec.field(default_factory=dict)


class Stop(Message, frozen=True):
    """Exit cleanly."""


# ---- engine ----
class Generate(Message, frozen=True):
    """Continue `prompt + generated`; `generated` was sampled before, here or elsewhere, with
    `logprobs` (f32). With `stream` a client reads the tokens as they are generated.
    """

    request: int
    version: str
    prompt: bytes
    generated: bytes
    sampling: Sampling
    score_prompt: bool = False
    owner: str = ""
    turn: str = ""
    logprobs: bytes = b""
    stream: bool = False


class Abort(Message, frozen=True):
    """Abort a request; there is no answer."""

    request: int


class PullVersion(Message, frozen=True):
    """Load a weight version: by `way`, payloads of the node's relay in order, or from the store.

    With `keep` a copy of what the relay gave stays in host memory, for later deltas.
    """

    version: str
    way: tuple[Payload, ...] = ()
    keep: bool = False


class DropVersion(Message, frozen=True):
    """Drop a weight version."""

    version: str


class RestEngine(Message, frozen=True, tag="Rest"):
    """Free the devices and keep the weights elsewhere; answered by `EngineRested`."""

    number: int


class EngineRested(Message, frozen=True, tag="Rested"):
    """The engine has left the devices; messages to it now wait for `WakeEngine`."""

    number: int


class WakeEngine(Message, frozen=True, tag="Wake"):
    """Take the devices again, with the same weights."""


class VersionReady(Message, frozen=True):
    """A version can be sampled from; `kept` if a copy is in host memory."""

    version: str
    kept: bool = False


class VersionFailed(Message, frozen=True):
    """A version could not be loaded."""

    version: str
    error: str


class PromptScores(Message, frozen=True):
    """Log-probs of a prompt's tokens (None for the first), and the best alternatives if asked."""

    request: int
    logprobs: list[float | None]
    topk: list[list[tuple[int, float]] | None] = msgspec.field(default_factory=list)
    targets: list[list[float]] = msgspec.field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = msgspec.field(default_factory=list)


class SampledTopK(Message, frozen=True):
    """The best alternatives of every row of the next token frame; empty where not requested."""

    rows: list[list[tuple[int, float]]]


# Limits of the turns that an engine keeps for a control plane that returns.
MAX_HELD_TURNS = 4096
MAX_HELD_TOKENS = 1 << 22


class HeldTurn(msgspec.Struct, frozen=True):
    """Tokens (u32) and log-probs (f32) of a turn that an engine has generated so far."""

    turn: str
    version: str
    tokens: bytes
    logprobs: bytes


class HeldTurns(Message, frozen=True):
    """First message of an engine that outlived a control plane: the turns that it stopped."""

    turns: list[HeldTurn]


class GenerateRefused(Message, frozen=True):
    """The engine refuses a request; `turn_at_fault` if no engine can run it."""

    request: int
    error: str
    turn_at_fault: bool


# ---- trainer ----
# `seq` is the operation's number in its model. `at_most`: instead of the requested state the
# trainer may take one that another left in the node's memory, if it has the effects of later
# operations, but of none after `at_most`.
class CreateModel(Message, frozen=True):
    """Create a model's trainable state from its base model."""

    op: int
    model: str
    source: str
    lora: LoraShape
    seed: int
    seq: int = -1
    at_most: int = -1


class RestoreModel(Message, frozen=True):
    """Restore a model's trainable state from a saved one, over the base model `source`."""

    op: int
    model: str
    saved: str
    source: str = ""
    seq: int = -1
    at_most: int = -1


class RunPass(Message, frozen=True):
    """forward or forward_backward; `batch` is a `wire.batches.PassBatch`."""

    op: int
    model: str
    batch: bytes
    seq: int = -1


class StepOptimizer(Message, frozen=True):
    """optim_step."""

    op: int
    model: str
    adam: Adam
    seq: int = -1


class DiscardGradients(Message, frozen=True):
    """Clear the accumulated gradients."""

    op: int
    model: str
    seq: int = -1


class SaveState(Message, frozen=True):
    """Save the complete state."""

    op: int
    model: str
    saved: str


class LoadState(Message, frozen=True):
    """Load weights, and the optimizer's state if asked, into a model."""

    op: int
    model: str
    saved: str
    optimizer: bool
    seq: int = -1


class PublishWeights(Message, frozen=True):
    """Write a sampler's weights to the weight store; `durable`: synced to disk.

    `stock`: also put them on the relay of the trainer's node, for other nodes to fetch.
    """

    op: int
    model: str
    version: str
    durable: bool = True
    stock: bool = False


class DropModel(Message, frozen=True):
    """Drop a model's state; there is no answer."""

    model: str


TrainerOp: TypeAlias = (
    CreateModel
    | RestoreModel
    | RunPass
    | StepOptimizer
    | DiscardGradients
    | SaveState
    | LoadState
    | PublishWeights
)


class PublishDetached(Message, frozen=True):
    """The trainer has its copy and is free; `OpDone` or `OpFailed` follows after the write."""

    op: int
    elapsed_s: float


class VersionStocked(Message, frozen=True):
    """A version's payloads are on the trainer node's relay: bytes by base, "" for the whole."""

    version: str
    node: str
    sizes: dict[str, int]


class OpDone(Message, frozen=True):
    """Success with a `PassResult`, metrics or nothing; `reached`: the last operation in a state
    that was found by `at_most`.
    """

    op: int
    elapsed_s: float
    result: bytes = b""
    reached: int | None = None


class OpFailed(Message, frozen=True):
    """An operation failed; `state_lost` if the model's state can no longer be trusted."""

    op: int
    error: str
    owner: Literal["user", "server"]
    state_lost: bool


ToWorker: TypeAlias = (
    Challenge
    | Welcome
    | HelloRefused
    | Stop
    | Generate
    | Abort
    | PullVersion
    | DropVersion
    | RestEngine
    | WakeEngine
    | DropModel
    | TrainerOp
    | agent.ToAgent
    | ToSandbox
    | ToRewards
    | lending.ToLender
)
FromWorker: TypeAlias = (
    Hello
    | Heartbeat
    | VersionReady
    | VersionFailed
    | EngineRested
    | PromptScores
    | SampledTopK
    | HeldTurns
    | GenerateRefused
    | PublishDetached
    | VersionStocked
    | OpDone
    | OpFailed
    | agent.FromAgent
    | FromSandbox
    | lending.FromLender
)
# Nothing else is decoded before a peer has proved its key. A Hello is the first message of an older
# peer, and is decoded only to tell it what it lacks.
FromStranger: TypeAlias = ConnectRequest | ChallengeResponse | Hello

_INVALID = "control message cannot be read"
_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_stranger: msgspec.msgpack.Decoder[FromStranger] = msgspec.msgpack.Decoder(FromStranger)


def encode(message: Message) -> bytes:
    return encode_frame(FrameKind.CONTROL, _encoder.encode(message))


def decode_to_worker(body: bytes) -> ToWorker:
    return decode_body(_to_worker, body, _INVALID)


def decode_from_worker(body: bytes) -> FromWorker:
    return decode_body(_from_worker, body, _INVALID)


def decode_from_stranger(body: bytes) -> FromStranger:
    return decode_body(_from_stranger, body, _INVALID)
