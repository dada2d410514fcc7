"""Columnar token frames: the tokens that an engine sampled for all of its requests in one or more
steps, and the requests that ended.

rows u32 | tokens u32 | requests u32[rows] | counts u32[rows] | tokens u32[] | log-probs f32[]

Little-endian. Row i has the next `counts[i]` tokens; if every row has one token, `counts` is
omitted. A msgpack list of `TurnFinished` follows, if any ended.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from slackwater.wire.frames import FrameError, FrameKind, decode_body, encode_frame

_SIZES = struct.Struct("<II")


class TurnFinished(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request sampled its last token, which is in this frame or an earlier one."""

    request: int
    reason: Literal["stop", "length"]
    total_tokens: int
    version: str


_encode_finished = msgspec.msgpack.Encoder().encode
_finished = msgspec.msgpack.Decoder(list[TurnFinished])


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Request `requests[i]` got the next `counts[i]` tokens, or one where there are no counts."""

    requests: Sequence[int] | NDArray[np.uint32]
    tokens: Sequence[int] | NDArray[np.uint32]
    logprobs: Sequence[float] | NDArray[np.float32]
    counts: Sequence[int] = ()
    finished: Sequence[TurnFinished] = ()


def encode_tokens(columns: TokenColumns) -> bytes:
    requests, tokens = (np.asarray(column, "<u4") for column in (columns.requests, columns.tokens))
    counts = columns.counts if len(tokens) > len(requests) else ()
    parts = (
        _SIZES.pack(len(requests), len(tokens)),
        requests.tobytes(),
        np.asarray(counts, "<u4").tobytes(),
        tokens.tobytes(),
        np.asarray(columns.logprobs, "<f4").tobytes(),
        _encode_finished(columns.finished) if columns.finished else b"",
    )
    return encode_frame(FrameKind.TOKENS, b"".join(parts))


def decode_tokens(
    body: bytes,
) -> "tuple[array[int], array[int], array[float], Sequence[int], Sequence[TurnFinished]]":
    """A TOKENS frame's requests, tokens, log-probs, counts (all of one: none) and endings."""
    if len(body) < _SIZES.size:
        raise FrameError(f"token frame of {len(body)} bytes has no sizes")
    rows, count = _SIZES.unpack_from(body)
    counts = _SIZES.size + 4 * rows
    tokens = counts + 4 * rows * (rows != count)
    logprobs = tokens + 4 * count
    end = logprobs + 4 * count
    if len(body) < end:
        raise FrameError(f"token frame of {len(body)} bytes does not hold {count} in {rows} rows")
    wrong = "token frame with endings that cannot be read"
    return (
        array("I", body[_SIZES.size : counts]),
        array("I", body[tokens:logprobs]),
        array("f", body[logprobs:end]),
        array("I", body[counts:tokens]) if rows != count else (),
        decode_body(_finished, body[end:], wrong) if len(body) > end else (),
    )
