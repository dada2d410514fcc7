"""Codes changes that were found elsewhere, such as on a GPU, as the CPU codes its own."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slackwater.weights.delta.compiled import compile_loop
from slackwater.weights.delta.encode import write_positions
from slackwater.weights.delta.frame import BITMAP_BYTES, BLOCK, IndexEncoding

_NONE, _DENSE = int(IndexEncoding.NONE), int(IndexEncoding.DENSE)


def coded(
    places: NDArray[np.uint16],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    elements: int,
    item: int,
) -> tuple[bytes, bytes, bytes]:
    """Code given changes: block b's places are `places[starts[b]:][:counts[b]]`.

    A dense block counts all its elements.
    """
    blocks = len(counts)
    kinds, sizes = np.empty(blocks, np.uint16), np.empty(blocks * 3, np.uint16)
    positions = np.empty(blocks * BITMAP_BYTES + 64, np.uint8)
    used = _coded(places, starts, counts, elements, item, kinds, sizes, positions)
    sized, positioned = (int(each) for each in used)
    return kinds.tobytes(), sizes[:sized].tobytes(), positions[:positioned].tobytes()


@compile_loop
def _coded(
    places: Any,
    starts: Any,
    counts: Any,
    elements: Any,
    item: Any,
    kinds: Any,
    sizes: Any,
    positions: Any,
) -> Any:
    words = np.empty(BLOCK // 64, np.uint64)
    scratch = np.empty(BLOCK, np.int32)
    gaps, lengths = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    sized, at = 0, 0
    for block in range(counts.size):
        size, count = min(elements - block * BLOCK, BLOCK), counts[block]
        if count == 0:
            kinds[block] = _NONE
            continue
        if count == size:
            kinds[block] = _DENSE
            continue
        words[:] = np.uint64(0)
        for i in range(starts[block], starts[block] + count):
            words[places[i] >> 6] |= np.uint64(1) << np.uint64(places[i] & 63)
        kind, sized, at = write_positions(
            words, size, count, item, sizes, sized, positions, at, scratch, gaps, lengths
        )
        kinds[block] = kind
    return sized, at
