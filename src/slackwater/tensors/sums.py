"""CRC-32 of long byte strings in pieces: each by itself, in any thread, and then joined.

The sum of two strings laid end to end follows from their sums and the length of the second: the
first sum, as a polynomial over two elements, times x to the power of that many bits, modulo
CRC-32's own polynomial, plus the second sum.
"""

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # bit 31 is the power 0


def joined(first: int, second: int, second_bytes: int) -> int:
    """The sum of two strings end to end, from their own sums."""
    return _times(_power(8 * second_bytes), first) ^ second


def _times(one: int, other: int) -> int:
    product, bit = 0, 1 << 31
    while one:
        if one & bit:
            product ^= other
            one ^= bit
        bit >>= 1
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product


@lru_cache(maxsize=64)  # most pieces are of one length
def _power(exponent: int) -> int:
    """x to the power of `exponent`, by squaring."""
    result, base = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _times(base, result)
        base = _times(base, base)
        exponent >>= 1
    return result
