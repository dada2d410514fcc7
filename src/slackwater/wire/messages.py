"""Control messages, as msgpack: the hello, what engines and trainers are told, and what they
answer.

What sandbox workers are told is in `wire/sandbox.py`, reward workers in `wire/rewards.py`, agents
in `wire/agent.py`.

Token ids travel as raw u32 bytes; models, versions and saved states are named by URI
(`model/uri.py`), never by path. Each message is a tagged struct; `decode` refuses anything else.
"""

from typing import Literal, TypeAlias, TypeVar

import msgspec

from slackwater.model.adam import Adam
from slackwater.model.sampling import Sampling
from slackwater.model.session import LoraShape
from slackwater.wire import agent, lending
from slackwater.wire.frames import FrameError, FrameKind, encode_frame
from slackwater.wire.frames import Message as Message
from slackwater.wire.rewards import RewardFacts, ToRewards
from slackwater.wire.sandbox import FromSandbox, SandboxFacts, ToSandbox

M = TypeVar("M")

PROTOCOL = 8


# ---- connection ----
# ConnectRequest -> Challenge -> ChallengeResponse -> Welcome -> Hello. The keys never travel
# (`wire/proof.py`).
class ConnectRequest(Message, frozen=True, forbid_unknown_fields=False):
    """First message of a worker or of a node's agent: who wants to connect, with 32 random bytes.

    Fields of another version are passed over, so that the protocol's number is what refuses it.
    """

    worker: str
    nonce: bytes
    protocol: int = PROTOCOL
    pool: str = ""  # of an agent: the pool that its key is for


class Challenge(Message, frozen=True):
    """The control plane's 32 random bytes: prove that you know your key."""

    nonce: bytes


class ChallengeResponse(Message, frozen=True):
    """The proof of a worker's or agent's key (`proof.peer_proof`)."""

    proof: bytes


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """What a proven worker or agent says of itself; first message of protocols before 4."""

    worker: str
    role: Literal["engine", "trainer", "sandbox", "rewards", "agent"]
    engine: "EngineFacts | None" = None
    protocol: int = PROTOCOL
    node: agent.NodeFacts | None = None
    sandbox: SandboxFacts | None = None
    rewards: RewardFacts | None = None


class EngineFacts(msgspec.Struct, frozen=True):
    """Which base model an engine has, what it can hold, and what it cannot do.

    `max_versions` counts whole sets of weights, `max_adapters` adapters (0: they count as whole
    sets). `kind` is one of `model.instance.InstanceKind`. Without `exact_continuation` it cannot go
    on at a position of a turn's random stream. One that `lends` serves, and takes `lending.LendTo`;
    one that is borrowed is its `job`'s alone. `node` is where it runs. One that `sleeps` takes
    `Rest` and `Wake`.
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
    """The control plane knows the worker, and proves that it is itself (`proof.plane_proof`)."""

    heartbeat_every_s: float
    proof: bytes = b""


class HelloRefused(Message, frozen=True):
    """The control plane will not talk to this peer; it closes after this. `again`: later it may."""

    reason: str
    again: bool = False


class Heartbeat(Message, frozen=True):
    """The worker lives."""

    gauges: dict[str, float] = msgspec.field(default_factory=dict)


class Stop(Message, frozen=True):
    """Leave cleanly."""


# ---- engine ----
class Generate(Message, frozen=True):
    """Continue `prompt + generated`; `generated` was sampled before, here or elsewhere, with
    `logprobs` (f32). Somebody reads the tokens of one that streams as they come.
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
    """Drop a request; no answer comes."""

    request: int


class PullVersion(Message, frozen=True):
    """Fetch a weight version and make it readable: by `way`, payloads (version, base) of the node's
    relay, or from the store.

    With `keep` a copy of what came by the way stays in host memory, for later deltas.
    """

    version: str
    way: tuple[tuple[str, str], ...] = ()
    keep: bool = False


class DropVersion(Message, frozen=True):
    """Forget a weight version."""

    version: str


class Rest(Message, frozen=True):
    """Free the devices, keeping the weights elsewhere; answered by `Rested` with the number."""

    number: int


class Rested(Message, frozen=True):
    """The engine has left the devices; what it is told meanwhile waits for `Wake`."""

    number: int


class Wake(Message, frozen=True):
    """Take the devices again, with the same weights."""


class VersionReady(Message, frozen=True):
    """A version can be sampled from; `kept` if a copy lies in host memory."""

    version: str
    kept: bool = False


class VersionFailed(Message, frozen=True):
    """A version could not be fetched."""

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


# What an engine keeps of turns for a control plane that returns, and what that takes of it.
MAX_HELD_TURNS = 4096
MAX_HELD_TOKENS = 1 << 22


class HeldTurn(msgspec.Struct, frozen=True):
    """What an engine has generated of a turn: tokens (u32) and their log-probs (f32)."""

    turn: str
    version: str
    tokens: bytes
    logprobs: bytes


class HeldTurns(Message, frozen=True):
    """First message of an engine that outlived a control plane; the turns have stopped there."""

    turns: list[HeldTurn]


class GenerateRefused(Message, frozen=True):
    """A request that cannot run here: `turn_at_fault` if it can run nowhere."""

    request: int
    error: str
    turn_at_fault: bool


# ---- trainer ----
# `seq` is the operation's number among its model's. `at_most`: a state of that model that a trainer
# left behind in the node's memory may be taken instead of what is asked for, if it has the effects
# of later operations, but of none after that one.
class CreateModel(Message, frozen=True):
    """Make a model's trainable state from its base model."""

    op: int
    model: str
    source: str
    lora: LoraShape
    seed: int
    seq: int = -1
    at_most: int = -1


class RestoreModel(Message, frozen=True):
    """Make a model's trainable state from a saved one, over the base model `source`."""

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
    """Clear what was accumulated."""

    op: int
    model: str
    seq: int = -1


class SaveState(Message, frozen=True):
    """Write the complete state."""

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
    """Put what a sampler needs into the weight store; `durable` where it must outlive a loss of
    power.

    `stock`: on the relay of the trainer's node too, for other nodes to take it from there.
    """

    op: int
    model: str
    version: str
    durable: bool = True
    stock: bool = False


class DropModel(Message, frozen=True):
    """Forget a model's state; no answer comes."""

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
    """The trainer has its copy and is free; `OpDone` or `OpFailed` follows once written."""

    op: int
    elapsed_s: float


class VersionStocked(Message, frozen=True):
    """A version's payloads are on the trainer node's relay: bytes by base, "" for the whole."""

    version: str
    node: str
    sizes: dict[str, int]


class OpDone(Message, frozen=True):
    """Success with a `PassResult`, metrics or nothing; `reached`: the last operation found."""

    op: int
    elapsed_s: float
    result: bytes = b""
    reached: int | None = None


class OpFailed(Message, frozen=True):
    """An operation failed; `state_lost` says that the model's state can no longer be trusted."""

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
    | Rest
    | Wake
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
    | Rested
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
# Before a peer has proved itself nothing else is decoded; a Hello, only to tell an older peer what
# it lacks.
FromStranger: TypeAlias = ConnectRequest | ChallengeResponse | Hello

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_stranger: msgspec.msgpack.Decoder[FromStranger] = msgspec.msgpack.Decoder(FromStranger)


def encode(message: Message) -> bytes:
    """A whole CONTROL frame."""
    return encode_frame(FrameKind.CONTROL, _encoder.encode(message))


def _decode(decoder: "msgspec.msgpack.Decoder[M]", body: bytes) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FrameError(f"control message cannot be read: {error}") from None


def decode_to_worker(body: bytes) -> ToWorker:
    """What the control plane told a worker."""
    return _decode(_to_worker, body)


def decode_from_worker(body: bytes) -> FromWorker:
    """What a worker told the control plane."""
    return _decode(_from_worker, body)


def decode_from_stranger(body: bytes) -> FromStranger:
    """What a peer said that has not proved itself."""
    return _decode(_from_stranger, body)
