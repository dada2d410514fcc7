"""Columnar token frames: what an engine sampled in one step or several, for all of its requests.

rows u32 | tokens u32 | requests u32[rows] | counts u32[rows] | tokens u32[] | log-probs f32[]

Little-endian. Row i is for the next `counts[i]` tokens; where every row has one, there are no
counts.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slackwater.wire.frames import FrameError

_SIZES = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Request `requests[i]` got the next `counts[i]` tokens, or one where there are no counts."""

    requests: Sequence[int] | NDArray[np.uint32]
    tokens: Sequence[int] | NDArray[np.uint32]
    logprobs: Sequence[float] | NDArray[np.float32]
    counts: Sequence[int] = ()


def encode_tokens(columns: TokenColumns) -> bytes:
    """The body of a TOKENS frame."""
    requests, tokens = (np.asarray(one, "<u4") for one in (columns.requests, columns.tokens))
    counts = columns.counts if len(tokens) > len(requests) else ()
    return b"".join(
        (
            _SIZES.pack(len(requests), len(tokens)),
            requests.tobytes(),
            np.asarray(counts, "<u4").tobytes(),
            tokens.tobytes(),
            np.asarray(columns.logprobs, "<f4").tobytes(),
        )
    )


def decode_tokens(
    body: bytes,
) -> "tuple[array[int], array[int], array[float], Sequence[int]]":
    """The columns of a TOKENS frame: requests, tokens, log-probs, counts; all of one: no counts."""
    if len(body) < _SIZES.size:
        raise FrameError(f"token frame of {len(body)} bytes has no sizes")
    rows, count = _SIZES.unpack_from(body)
    counts = _SIZES.size + 4 * rows
    tokens = counts + 4 * rows * (rows != count)
    logprobs = tokens + 4 * count
    if len(body) != logprobs + 4 * count:
        raise FrameError(f"token frame of {len(body)} bytes does not hold {count} in {rows} rows")
    return (
        _ids(body[_SIZES.size : counts]),
        _ids(body[tokens:logprobs]),
        array("d", np.frombuffer(body, "<f4", count, logprobs).astype(np.float64).tobytes()),
        _ids(body[counts:tokens]) if rows != count else (),
    )


def _ids(column: bytes) -> "array[int]":
    found = array("I", column)
    if sys.byteorder == "big":
        found.byteswap()
    return found
