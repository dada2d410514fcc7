"""Positions of changes in the fewest bits: a bitmap, Rice-coded gaps, or Rice-coded runs.

Rice code of g with parameter k: the low k bits of all numbers, packed and padded to a byte; then
for each number g >> k zeros and a one, likewise packed. Bits fill a byte from the lowest up.
"""

from typing import Any

import numpy as np

from slackwater.weights.delta.compiled import compiled, put_word, trailing_zeros, word_at

_MAX_K = 15
_ONE = np.uint64(1)


@compiled
def best_k(numbers: Any, count: Any) -> Any:
    """A near-optimal Rice parameter and the bits of its unary part.

    Tries the bit length of the mean and the two below it; ties take the smallest.
    """
    total = np.int64(0)
    for i in range(count):
        total += numbers[i]
    longest = 0
    while longest < _MAX_K and (total // count) >> longest:
        longest += 1
    best, best_bytes, best_unary = 0, np.int64(1) << 60, np.int64(0)
    for k in range(max(longest - 2, 0), longest + 1):
        unary = np.int64(count)
        for i in range(count):
            unary += numbers[i] >> k
        size = (count * k + 7) // 8 + (unary + 7) // 8
        if size < best_bytes:
            best, best_bytes, best_unary = k, size, unary
    return best, best_unary


@compiled
def write_low(numbers: Any, count: Any, k: Any, out: Any, at: Any) -> Any:
    """Append the low bits at byte `at`; the next free byte. Overwrites up to 8 bytes beyond."""
    base, mask = np.uintp(out.ctypes.data) + np.uintp(at), (_ONE << np.uint64(k)) - _ONE
    held, bits, done = np.uint64(0), 0, 0
    for i in range(count):
        held |= (np.uint64(numbers[i]) & mask) << np.uint64(bits)
        bits += k
        if bits >= 32:
            put_word(base + np.uintp(done), held)
            done += 4
            held >>= np.uint64(32)
            bits -= 32
    put_word(base + np.uintp(done), held)
    return at + done + (bits + 7) // 8


@compiled
def write_unary(numbers: Any, count: Any, k: Any, out: Any, at: Any) -> Any:
    """Append the unary part of each number; the next free byte."""
    base = np.uintp(out.ctypes.data) + np.uintp(at)
    held, bits, done = np.uint64(0), 0, 0
    for i in range(count):
        bits += numbers[i] >> k
        while bits >= 64:
            put_word(base + np.uintp(done), held)
            done += 8
            held = np.uint64(0)
            bits -= 64
        held |= _ONE << np.uint64(bits)
        bits += 1
    if bits:
        put_word(base + np.uintp(done), held)
    return at + done + (bits + 7) // 8


@compiled
def read_numbers(data: Any, low: Any, unary: Any, end: Any, count: Any, k: Any, out: Any) -> Any:
    """Read `count` numbers: low bits from `low`, unary part from `unary` to `end`; False if
    invalid.

    Invalid: a number above 65535, unused bytes, or non-zero padding. `data` must have 8 bytes
    beyond.
    """
    base, mask = np.uintp(data.ctypes.data), (_ONE << np.uint64(k)) - _ONE
    lows, bit = base + np.uintp(low), 0
    word, have, zeros = np.uint64(0), 0, 0
    for i in range(count):
        while word == 0:
            zeros += have
            if unary >= end or zeros > 65535:
                return False
            word, have = word_at(base + np.uintp(unary)), 64
            if end - unary < 8:
                have = (end - unary) * 8
                word &= (_ONE << np.uint64(have)) - _ONE
            unary += 8
        skipped = trailing_zeros(word)
        word = (word >> np.uint64(skipped)) >> _ONE
        have -= skipped + 1
        held = word_at(lows + np.uintp(bit >> 3)) >> np.uint64(bit & 7)
        number = (np.int64(zeros + skipped) << k) | np.int64(held & mask)
        bit += k
        zeros = 0
        if number > 65535:
            return False
        out[i] = number
    if bit & 7 and data[low + (bit >> 3)] >> (bit & 7):
        return False
    return word == 0 and have < 8 and unary >= end


@compiled
def set_bits(words: Any, start: Any, stop: Any, out: Any) -> Any:
    """The places of the ones in `words[start:stop]`; returns their number."""
    count = 0
    for index in range(start, stop):
        word = words[index]
        base = (index - start) * 64
        while word != 0:
            out[count] = base + trailing_zeros(word)
            count += 1
            word &= word - _ONE
    return count
