"""Host memory that keeps a job warm, by the size of its model."""

from bisect import bisect_right
from collections.abc import Sequence

# WEAVE Table 2: GB on one 8-GPU node for the rollout and for the train actors; 3B is scaled
# from 7B.
_BILLIONS = (3.0, 7.0, 14.0, 32.0, 70.0)
_ROLLOUT_GB = (137.8, 275.7, 445.4, 490.3, 391.2)
_TRAIN_GB = (120.0, 240.0, 456.1, 520.4, 458.7)


def rollout_state_gb(model_billions: float) -> float:
    """Per rollout node; linear between the sizes of the table, constant beyond them."""
    return _interpolate(model_billions, _ROLLOUT_GB)


def train_state_gb(model_billions: float) -> float:
    """Per train node."""
    return _interpolate(model_billions, _TRAIN_GB)


def _interpolate(billions: float, sizes_gb: Sequence[float]) -> float:
    right = bisect_right(_BILLIONS, billions)
    if right == 0:
        return sizes_gb[0]
    if right == len(_BILLIONS):
        return sizes_gb[-1]
    low, high = _BILLIONS[right - 1], _BILLIONS[right]
    share = (billions - low) / (high - low)
    return sizes_gb[right - 1] + share * (sizes_gb[right] - sizes_gb[right - 1])
