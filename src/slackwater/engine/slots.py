"""Running requests by column: one slot each, so that a step touches arrays and not objects.

Uniform numbers are addressed by (seed, position), without state: any engine can go on at any point.
"""

import numpy as np
from numpy.typing import NDArray

from slackwater.engine.request import GenerationRequest

_STOP_WIDTH = 8

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def stream_keys(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One key per seed: neighbouring seeds give unrelated streams."""
    return _mix(seeds + _GOLDEN)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """In [0, 1), one per row: the number at `positions` of the stream of `keys`."""
    state = keys + positions.astype(np.uint64) * _GOLDEN
    bits = _mix(_mix(state) ^ keys) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)


class SlotTable:
    """Arrays indexed by slot. `length` tokens are known, `computed` of them are in the cache."""

    def __init__(self, slots: int, context: int, block_tokens: int) -> None:
        self.capacity, self.context = slots, context
        self.block_tokens = block_tokens
        blocks = -(-context // block_tokens)
        self.tokens = np.zeros((slots, context + 1), np.int32)
        self.tables = np.zeros((slots, blocks), np.int32)
        self.num_blocks = np.zeros(slots, np.int64)
        self.length = np.zeros(slots, np.int64)
        self.computed = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.request_id = np.zeros(slots, np.uint32)
        self.key = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.stops = np.full((slots, _STOP_WIDTH), -1, np.int64)
        self.watched = np.zeros(slots, np.bool_)  # may end by more than a stop token
        self.shaped = np.zeros(slots, np.bool_)
        self.scored = np.zeros(slots, np.bool_)
        self.top_tokens = np.zeros(slots, np.int64)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def claim(self, request: GenerationRequest, stop_ids: frozenset[int], *, scored: bool) -> int:
        """Put a request into a free slot, nothing of it computed yet."""
        slot = self._free.pop()
        params = request.params
        known = (*request.prompt, *request.generated)
        self.tokens[slot, : len(known)] = known
        self.length[slot] = len(known)
        self.computed[slot] = self.num_blocks[slot] = 0
        self.limit[slot] = min(len(request.prompt) + params.max_tokens, self.context)
        if request.generated and request.generated[-1] in stop_ids:
            self.limit[slot] = len(known)
        self.request_id[slot] = request.request_id
        seed = np.array([params.seed % 2**64], np.uint64)
        self.key[slot] = stream_keys(seed)[0]
        self.temperature[slot] = params.temperature
        self.top_p[slot], self.top_k[slot] = params.top_p, params.top_k
        self._set_stops(slot, stop_ids)
        self.scored[slot] = scored
        self.watched[slot] = bool(params.stop_strings) or params.grammar is not None
        self.shaped[slot] = params.shaped
        self.top_tokens[slot] = params.topk_logprobs
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def _set_stops(self, slot: int, stop_ids: frozenset[int]) -> None:
        width = self.stops.shape[1]
        if len(stop_ids) > width:
            grown = np.full((self.capacity, len(stop_ids)), -1, np.int64)
            grown[:, :width] = self.stops
            self.stops = grown
        self.stops[slot] = -1
        self.stops[slot, : len(stop_ids)] = sorted(stop_ids)
