"""Uniform numbers addressed by (seed, position): no state, so any engine can go on at any point."""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def stream_keys(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One key per seed: neighbouring seeds give unrelated streams."""
    return _mixed(seeds + _GOLDEN)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """In [0, 1), one per row: the number at `positions` of the stream of `keys`."""
    state = keys + positions.astype(np.uint64) * _GOLDEN
    bits = _mixed(_mixed(state) ^ keys) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)
