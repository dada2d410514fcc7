"""Turns rewards into advantages of sampled tokens."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def is_informative(rewards: Sequence[float]) -> bool:
    """Whether a group can teach anything: its rewards differ (DAPO's dynamic sampling)."""
    return max(rewards) - min(rewards) > 1e-9


def farthest_apart(rewards: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` rewards with the largest variance (down-sampling as in PODS)."""
    order = sorted(range(len(rewards)), key=lambda index: (rewards[index], index))
    if count >= len(order):
        return sorted(order)
    choices = [order[:low] + order[len(order) - count + low :] for low in range(count + 1)]
    return sorted(max(choices, key=lambda indices: float(np.var([rewards[p] for p in indices]))))


def group_advantages(rewards: Sequence[float], *, by_spread: bool) -> Floats:
    """Rewards minus the group's mean, and with `by_spread` over its standard deviation (GRPO).

    Equal rewards give zeros: normalizing their rounding errors would amplify noise.
    """
    values = np.asarray(rewards, np.float64)
    if not is_informative(rewards):
        return np.zeros(len(values), np.float32)
    centred: npt.NDArray[np.float64] = values - values.mean()
    return (centred / (values.std() if by_spread else 1.0)).astype(np.float32)


def token_advantages(
    advantages: Sequence[float],
    logprobs: Sequence[Floats],
    entropy_bonus: float,
    tokens: int | None = None,
) -> list[Floats]:
    """The advantage of each sampled token of an update, per sample.

    The service's losses are sums: dividing by the update's tokens gives the token mean of DAPO 3.3.
    The bonus adds the entropy's policy gradient, by how surprising a token was. `tokens` is given
    if the update has more samples than these.
    """
    surprise = -np.concatenate([*logprobs, np.zeros(0, np.float32)])
    mean_surprise = float(surprise.mean()) if surprise.size else 0.0
    divisor = tokens or max(surprise.size, 1)
    return [
        ((advantage + entropy_bonus * (-values - mean_surprise)) / divisor).astype(np.float32)
        for advantage, values in zip(advantages, logprobs, strict=True)
    ]
