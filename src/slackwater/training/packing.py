"""Which sequences share a micro-batch.

Sequences are packed end to end without padding. The plan depends on the lengths and the budget only, so a
replayed pass adds the same numbers in the same order and ends in the same bits.
"""

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices by micro-batch: longest first into the first with room; a sequence above the budget goes alone.

    Inside a micro-batch indices rise, and micro-batches are ordered by their first index.
    """
    room: list[int] = []
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        slot = next((slot for slot, free in enumerate(room) if length <= free), len(room))
        if slot == len(room):
            room.append(budget_tokens)
            batches.append([])
        batches[slot].append(index)
        room[slot] -= length
    return sorted(sorted(batch) for batch in batches)
