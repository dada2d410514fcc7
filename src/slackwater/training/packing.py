"""Which sequences share a micro-batch.

Sequences are packed end to end without padding, in the order given, so that samples of one prompt
stay neighbours and share its rows. The plan depends on the costs and the budget only: a replayed
pass adds the same numbers in the same order.
"""

from collections.abc import Sequence


def pack(alone: Sequence[int], after_previous: Sequence[int], budget: int) -> list[list[int]]:
    """Indices by micro-batch, each as full as its next sequence allows; one above the budget goes
    alone.

    A sequence costs `alone[i]` as the first of a micro-batch, and `after_previous[i]` behind the
    one before it.
    """
    batches: list[list[int]] = []
    room = 0
    for index, (whole, further) in enumerate(zip(alone, after_previous, strict=True)):
        if batches and further <= room:
            batches[-1].append(index)
            room -= further
        else:
            batches.append([index])
            room = budget - whole
    return batches
