"""Messages between the control plane and its front ends, many to a frame.

A frame's body is a msgpack list of tagged arrays. Tokens are columns of u32 and f32
bytes (little-endian); tokens of many streaming turns are one record. A front end numbers its
requests, and answers name the number.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from slackwater.model.sampling import Sampling, sample_seed
from slackwater.model.session import SamplingSession
from slackwater.wire.frames import FrameError, FrameKind, decode_body, encode_frame


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the channel's messages."""


# ---- from a front end ----
class GenerateChoices(Record, frozen=True):
    """Generate `n` choices for each prompt (a u32 per token). They are numbered from `number` on,
    and each has its own seed. `max_tokens` has one value per prompt. `arrived_s` is on the
    monotonic clock, which all processes of a machine share.
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

    @property
    def count(self) -> int:
        return len(self.prompts) * self.n

    def sampling_of(self, place: int) -> Sampling:
        """Sampling parameters of one choice, by its index."""
        seed, most = sample_seed(self.sampling.seed, place), self.max_tokens[place // self.n]
        if (seed, most) == (self.sampling.seed, self.sampling.max_tokens):
            return self.sampling
        return replace(self.sampling, seed=seed, max_tokens=most)


class AbandonChoices(Record, frozen=True):
    """The client of these choices, numbered from `number` on, has left: stop those that run."""

    tenant: str
    number: int
    count: int


class Sample(Record, frozen=True):
    """A Tinker sample; `payload` is its content in the durable log."""

    number: int
    tenant: str
    sampling_session: str
    seq: int
    payload: bytes


class AskSession(Record, frozen=True):
    """Look up a sampling session."""

    number: int
    tenant: str
    sampling_session: str


class AskModel(Record, frozen=True):
    """Look up the weights of a model's name."""

    number: int
    tenant: str
    name: str


class AskFuture(Record, frozen=True):
    """Get the outcome of a request; waits up to `hold_s`."""

    number: int
    tenant: str
    request: str
    hold_s: float


# ---- to a front end ----
class Setup(Record, frozen=True):
    """The first record: what a front end needs before it serves."""

    keys: dict[str, str]
    models: dict[str, str]
    host: str
    allowed_hosts: list[str]
    max_body_bytes: int
    max_turns: int
    hold_s: float


class StopServing(Record, frozen=True):
    """Finish open requests, then exit."""


class ChoicesAccepted(Record, frozen=True):
    """The choices numbered from `number` on are being generated; only sent for streams."""

    number: int


class RequestRefused(Record, frozen=True):
    """The request of this number cannot be executed; `status` is its HTTP status."""

    number: int
    status: int
    message: str


class TimeCharged(Record, frozen=True):
    """Seconds that the control plane has worked for tenants since the last record."""

    seconds: dict[str, float]


class Tokens(Record, frozen=True):
    """Columns: choice `numbers[i]` got the next `counts[i]` tokens, with their log-probs.

    Numbers are u64: a tenant uses up 2^32 in hours by asking for thousands of choices and leaving.
    """

    numbers: bytes
    counts: bytes
    tokens: bytes
    logprobs: bytes


class AnnotatedTokens(Record, frozen=True):
    """Tokens of one choice with the requested annotations, encoded."""

    number: int
    more: bytes


class ChoiceCompleted(Record, frozen=True):
    """A choice is complete, with its encoded result."""

    number: int
    result: bytes


class ChoiceFailed(Record, frozen=True):
    """A choice cannot be generated."""

    number: int
    error: str


class SampleAccepted(Record, frozen=True):
    """The sample is durable under this request id; the outcome of a `new` one follows."""

    number: int
    request: str
    new: bool


class FutureSettled(Record, frozen=True):
    """The outcome of a request. `number` is None if it follows a sample without an `AskFuture`."""

    number: int | None
    request: str
    kind: str
    result: bytes | None
    error: str | None
    owner: str | None


class RequestPending(Record, frozen=True):
    """A request has not ended; `paused` is the reason if it is paused."""

    number: int
    paused: str | None


class SessionFound(Record, frozen=True):
    number: int
    session: SamplingSession


class ModelFound(Record, frozen=True):
    number: int
    base_model: str
    version: str


FromFront = GenerateChoices | AbandonChoices | Sample | AskSession | AskModel | AskFuture
ToFront = (
    Setup
    | StopServing
    | ChoicesAccepted
    | RequestRefused
    | TimeCharged
    | Tokens
    | AnnotatedTokens
    | ChoiceCompleted
    | ChoiceFailed
    | SampleAccepted
    | FutureSettled
    | RequestPending
    | SessionFound
    | ModelFound
)
_LIST = struct.Struct(">BI")  # msgpack's header of a list
_encoder = msgspec.msgpack.Encoder()
_from_front = msgspec.msgpack.Decoder(list[FromFront])
_to_front = msgspec.msgpack.Decoder(list[ToFront])


def encode_record(record: Record) -> bytes:
    """One record of a frame; FrameError if it cannot be encoded."""
    try:
        return _encoder.encode(record)
    except (ValueError, OverflowError) as error:
        raise FrameError(f"{type(record).__name__} cannot be sent: {error}") from None


def join_records(encoded: Sequence[bytes]) -> bytes:
    return encode_frame(FrameKind.CONTROL, _LIST.pack(0xDD, len(encoded)) + b"".join(encoded))


def decode_from_front(body: bytes) -> list[FromFront]:
    return decode_body(_from_front, body, "invalid records from a front end")


def decode_to_front(body: bytes) -> list[ToFront]:
    return decode_body(_to_front, body, "invalid records from the control plane")
