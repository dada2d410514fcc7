"""Which sequences share a micro-batch.

Sequences are packed end to end without padding, in the order given, so that samples of one prompt stay neighbours and
share its rows. The plan depends on the lengths and the budget only: a replayed pass adds the same numbers in the same order.
"""

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices by micro-batch, each as full as its next sequence allows; one above the budget goes alone."""
    batches: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not batches or length > room:
            batches.append([])
            room = budget_tokens
        batches[-1].append(index)
        room -= length
    return batches
