"""Columnar token frames: what one engine step sampled, for all of its requests.

count u32 | request ids u32[count] | tokens u32[count] | log-probs f32[count]   (little-endian)
"""

import struct
import sys
from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slackwater.wire.frames import FrameError

_COUNT = struct.Struct("<I")
_ROW_BYTES = 12


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Row i says that request `requests[i]` got `tokens[i]` with log-prob `logprobs[i]`."""

    requests: NDArray[np.uint32]
    tokens: NDArray[np.uint32]
    logprobs: NDArray[np.float32]


def encode_tokens(columns: TokenColumns) -> bytes:
    """The body of a TOKENS frame."""
    return b"".join(
        (
            _COUNT.pack(len(columns.requests)),
            columns.requests.astype("<u4", copy=False).tobytes(),
            columns.tokens.astype("<u4", copy=False).tobytes(),
            columns.logprobs.astype("<f4", copy=False).tobytes(),
        )
    )


def decode_tokens(body: bytes) -> "tuple[array[int], array[int], array[float]]":
    """The columns of a TOKENS frame: requests, tokens, log-probs, as arrays."""
    if len(body) < _COUNT.size:
        raise FrameError(f"token frame of {len(body)} bytes has no count")
    (count,) = _COUNT.unpack_from(body)
    if len(body) != _COUNT.size + count * _ROW_BYTES:
        raise FrameError(f"token frame of {len(body)} bytes does not hold {count} rows")
    tokens = _COUNT.size + 4 * count
    logprobs = tokens + 4 * count
    return (
        _ids(body[_COUNT.size : tokens]),
        _ids(body[tokens:logprobs]),
        array("d", np.frombuffer(body, "<f4", count, logprobs).astype(np.float64).tobytes()),
    )


def _ids(column: bytes) -> "array[int]":
    found = array("I", column)
    if sys.byteorder == "big":
        found.byteswap()
    return found
