"""A part's checksum: 64 bits at memory speed, updated as single elements change.

The bytes are little-endian 64-bit words w, zero-padded, in chunks of 512. With a fixed key per
place in a chunk and an odd factor per chunk, modulo 2**64:

    term(w, key) = w + ((low(w) + low(key)) mod 2**32) * ((high(w) + high(key)) mod 2**32)
    checksum     = mix(number of bytes) + sum over chunks of factor(chunk) * sum of its terms

It is a sum, so the order does not matter, and a changed word changes it by factor * (new term - old
term). It detects damage and mistakes; it is not a signature.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slackwater.weights.delta.compiled import SUM_WORDS, compile_loop, load_word, sum_keyed_words

CHUNK_BYTES = 4096
CHUNK_WORDS = CHUNK_BYTES // 8
GOLDEN = 0x9E3779B97F4A7C15
MIX_ONE = 0xBF58476D1CE4E5B9
MIX_TWO = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_LOW, _HALF, _ODD = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(1)
_U_GOLDEN, _U_ONE, _U_TWO = np.uint64(GOLDEN), np.uint64(MIX_ONE), np.uint64(MIX_TWO)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(value: int) -> int:
    """A bijection of 64-bit words that leaves no pattern (splitmix64's)."""
    value = ((value ^ (value >> 30)) * MIX_ONE) & _MASK
    value = ((value ^ (value >> 27)) * MIX_TWO) & _MASK
    return value ^ (value >> 31)


KEYS: NDArray[np.uint64] = np.array(
    [mix((GOLDEN * (place + 1)) & _MASK) for place in range(CHUNK_WORDS)], np.uint64
)


@compile_loop
def mix_word(value: Any) -> Any:
    """`mix`, compiled."""
    value = (value ^ (value >> _S30)) * _U_ONE
    value = (value ^ (value >> _S27)) * _U_TWO
    return value ^ (value >> _S31)


@compile_loop
def factor_of(chunk: Any) -> Any:
    """The odd factor of a chunk, by its number."""
    return mix_word(np.uint64(chunk + 1) * _U_GOLDEN) | _ODD


@compile_loop
def term_of(word: Any, key: Any) -> Any:
    """A word's contribution to its chunk."""
    return word + ((word + key) & _LOW) * (((word >> _HALF) + (key >> _HALF)) & _LOW)


@compile_loop
def word_of(data: Any, place: int) -> Any:
    """The 64-bit word number `place` of the bytes, filled up with zeros at their end."""
    start = place * 8
    if start + 8 <= data.size:
        return load_word(np.uintp(data.ctypes.data) + np.uintp(start))
    word = np.uint64(0)
    for byte in range(data.size - start):
        word |= np.uint64(data[start + byte]) << np.uint64(8 * byte)
    return word


@compile_loop
def range_sum(data: Any, start: int, stop: int, keys: Any) -> Any:
    """The contribution of the bytes from `start` to `stop`, both at chunk edges or the end."""
    total = np.uint64(0)
    for begin in range(start, stop, CHUNK_BYTES):
        words = (min(stop - begin, CHUNK_BYTES) + 7) // 8
        whole = min(stop - begin, CHUNK_BYTES) // (8 * SUM_WORDS)
        chunk = np.uint64(0)
        if whole:
            base = np.uintp(data.ctypes.data) + np.uintp(begin)
            chunk = sum_keyed_words(base, np.uintp(keys.ctypes.data), np.uint64(whole))
        for place in range(whole * SUM_WORDS, words):
            chunk += term_of(word_of(data, begin // 8 + place), keys[place])
        total += chunk * factor_of(begin // CHUNK_BYTES)
    return total


@compile_loop
def sum_of_size(size: int) -> Any:
    """The contribution of the number of bytes."""
    return mix_word(np.uint64(size))


@compile_loop
def _checksum(data: Any, keys: Any) -> Any:
    return sum_of_size(data.size) + range_sum(data, 0, data.size, keys)


def checksum(data: NDArray[np.uint8]) -> int:
    """The checksum of contiguous bytes."""
    return int(_checksum(data, KEYS))


class RunningSum:
    """The checksum of bytes that arrive in ranges; each is summed while it is in the CPU cache."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
        self._total = int(sum_of_size(data.size))
        self._left = data.size
        self._usable = True

    def add(self, start: int, stop: int) -> None:
        """These bytes have arrived; an unaligned range leaves the sum to `value`."""
        if start % CHUNK_BYTES or (stop % CHUNK_BYTES and stop != self._data.size):
            self._usable = False
        if self._usable:
            self._total += int(range_sum(self._data, start, stop, KEYS))
            self._left -= stop - start

    def value(self) -> int:
        """The checksum of all bytes; read again if the ranges were unaligned."""
        if self._usable and self._left == 0:
            return self._total & _MASK
        return checksum(self._data)
