"""A pass's data shared out among the data ranks, and its outputs brought together again."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from slackwater.nets.ranks import Ranks

Floats = npt.NDArray[np.float32]


def share_out(alone: Sequence[int], after_previous: Sequence[int], ranks: int) -> list[range]:
    """Neighbours for each rank, so that the rank with most work has as little as can be.

    Costs are those of `pack`: a sequence is cheaper behind one that begins alike, so the samples of
    a prompt stay together unless dividing them makes the longest share shorter.
    """
    low, high = max(alone), sum(alone)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(alone, after_previous, middle)) <= ranks:
            high = middle
        else:
            low = middle + 1
    shares = _filled(alone, after_previous, low)
    return shares + [range(len(alone), len(alone))] * (ranks - len(shares))


def _filled(alone: Sequence[int], after_previous: Sequence[int], budget: int) -> list[range]:
    """Shares of at most `budget` each, as few as can be; no sequence costs more alone."""
    starts, room = [0], budget - alone[0]
    for index in range(1, len(alone)):
        if after_previous[index] <= room:
            room -= after_previous[index]
        else:
            starts.append(index)
            room = budget - alone[index]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(alone)], strict=True)]


def gather_outputs(
    ranks: Ranks, sizes: Sequence[tuple[int, ...]], own: Sequence[Floats | None], loss: float
) -> tuple[list[Floats], float]:
    """Every datum's log-probs in the caller's order and the whole loss, on every rank.

    `own` has None for the data of other ranks, each of which is on exactly one data rank.
    """
    numbers = [int(np.prod(size)) for size in sizes]
    together = torch.zeros(sum(numbers))
    for part, held in zip(together.split(numbers), own, strict=True):
        if held is not None:
            part.copy_(torch.from_numpy(held.reshape(-1)))
    ranks.sum_over_data(together)
    total = ranks.sum_over_data(torch.tensor([loss], dtype=torch.float64))
    parts = zip(together.split(numbers), sizes, strict=True)
    return [part.numpy().reshape(size) for part, size in parts], float(total)
