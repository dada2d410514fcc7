"""Messages between the control plane and its front ends, many to a frame.

A frame's body is a msgpack list of tagged arrays. Tokens are columns: prompts and results as u32
and f32 bytes (little-endian), and what streaming turns got at a time as one record. A
front end numbers what it asks; answers name the number.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from slackwater.model.sampling import Sampling, sample_seed
from slackwater.model.session import SamplingSession
from slackwater.wire.frames import FrameError, FrameKind, encode_frame


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the channel's messages."""


# ---- from a front end ----
class GenerateChoices(Record, frozen=True):
    """Generate `n` choices for each prompt; they are numbered from `number` on, and each has a seed
    of its own. `max_tokens` are those of each prompt. `arrived_s` is on the monotonic clock, which
    processes of a machine share.
    """

    number: int
    tenant: str
    job: str
    base_model: str
    version: str
    stream: bool
    arrived_s: float | None
    sampling: Sampling
    n: int
    prompts: list[bytes]
    max_tokens: list[int]

    def sampling_of(self, place: int) -> Sampling:
        """How to draw the choice at that place."""
        seed, most = sample_seed(self.sampling.seed, place), self.max_tokens[place // self.n]
        if (seed, most) == (self.sampling.seed, self.sampling.max_tokens):
            return self.sampling
        return replace(self.sampling, seed=seed, max_tokens=most)


class Abandon(Record, frozen=True):
    """Nobody waits for these choices any more."""

    tenant: str
    numbers: list[int]


class Sample(Record, frozen=True):
    """A Tinker sample; `payload` is what the durable log keeps of it."""

    number: int
    tenant: str
    sampling_session: str
    seq: int
    payload: bytes


class AskSession(Record, frozen=True):
    """What a sampling session stands for."""

    number: int
    tenant: str
    sampling_session: str


class AskModel(Record, frozen=True):
    """Which weights a model's name stands for."""

    number: int
    tenant: str
    name: str


class AskFuture(Record, frozen=True):
    """How a request ended; waits up to `hold_s`."""

    number: int
    tenant: str
    request: str
    hold_s: float


# ---- to a front end ----
class Setup(Record, frozen=True):
    """What a front end must know before it serves; the first record."""

    keys: dict[str, str]
    models: dict[str, str]
    host: str
    allowed_hosts: list[str]
    max_body_bytes: int
    max_turns: int
    hold_s: float
    operator: str


class StopServing(Record, frozen=True):
    """Answer what is under way, then end."""


class Accepted(Record, frozen=True):
    """The choices numbered from here on are being generated; of those that stream only."""

    number: int


class Refused(Record, frozen=True):
    """What was asked under this number cannot be done; `status` is what HTTP says of it."""

    number: int
    status: int
    message: str


class Spent(Record, frozen=True):
    """Seconds that the control plane has worked for tenants since it said so last."""

    seconds: dict[str, float]


class Tokens(Record, frozen=True):
    """Columns: choice `numbers[i]` got the next `counts[i]` tokens, with their log-probs.

    Numbers are u64: a tenant uses up 2^32 in hours by asking for thousands of choices and leaving.
    """

    numbers: bytes
    counts: bytes
    tokens: bytes
    logprobs: bytes


class MoreTokens(Record, frozen=True):
    """Tokens of one choice with what was asked for beside them, encoded."""

    number: int
    more: bytes


class Completed(Record, frozen=True):
    """A choice is whole; its result, encoded."""

    number: int
    result: bytes


class Failed(Record, frozen=True):
    """A choice that cannot be generated."""

    number: int
    error: str


class Sampled(Record, frozen=True):
    """The sample is durable under this name; if it is `new`, its outcome comes this way too."""

    number: int
    request: str
    new: bool


class FutureSettled(Record, frozen=True):
    """How a request ended. `number` is None where nobody asked: its sample came this way."""

    number: int | None
    request: str
    kind: str
    result: bytes | None
    error: str | None
    owner: str | None


class Pending(Record, frozen=True):
    """A request has not ended; `paused` says why nothing is done about it."""

    number: int
    paused: str | None


class SessionFound(Record, frozen=True):
    number: int
    session: SamplingSession


class ModelFound(Record, frozen=True):
    number: int
    base_model: str
    version: str


FromFront = GenerateChoices | Abandon | Sample | AskSession | AskModel | AskFuture
ToFront = (
    Setup
    | StopServing
    | Accepted
    | Refused
    | Spent
    | Tokens
    | MoreTokens
    | Completed
    | Failed
    | Sampled
    | FutureSettled
    | Pending
    | SessionFound
    | ModelFound
)
_LIST = struct.Struct(">BI")  # msgpack's head of a list
_encoder = msgspec.msgpack.Encoder()
_from_front = msgspec.msgpack.Decoder(list[FromFront])
_to_front = msgspec.msgpack.Decoder(list[ToFront])


def encode_record(record: Record) -> bytes:
    """One record of a frame; FrameError if it holds what cannot be sent."""
    try:
        return _encoder.encode(record)
    except (ValueError, OverflowError) as error:
        raise FrameError(f"{type(record).__name__} cannot be sent: {error}") from None


def join_records(encoded: Sequence[bytes]) -> bytes:
    """One frame."""
    return encode_frame(FrameKind.CONTROL, _LIST.pack(0xDD, len(encoded)) + b"".join(encoded))


def decode_from_front(body: bytes) -> list[FromFront]:
    """What a front end sent; FrameError if it is anything else."""
    try:
        return _from_front.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise FrameError(f"no records of a front end: {error}") from None


def decode_to_front(body: bytes) -> list[ToFront]:
    try:
        return _to_front.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise FrameError(f"no records of the control plane: {error}") from None
