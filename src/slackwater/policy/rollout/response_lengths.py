"""The distribution of response lengths, and how much longer an unfinished response may get."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

_KEPT = 4096


class ResponseLengths:
    """The lengths of the last `_KEPT` responses, as an empirical distribution."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_KEPT)
        self._sorted: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self._lengths)

    def observe(self, tokens: int) -> None:
        self._lengths.append(tokens)
        if len(self._lengths) % 64 == 0:
            self._sorted = None

    @property
    def mean(self) -> float:
        return float(self._table().mean()) if self._lengths else 0.0

    def sample_remaining(self, made: NDArray[np.float64]) -> NDArray[np.float64]:
        """Draw the remaining tokens of each turn, given that it has `made` tokens already.

        The i-th turn takes the (i * golden ratio mod 1) quantile of its conditional distribution,
        so that the draws are spread evenly and deterministic. Where too few lengths are known, the
        rest is about as long as what was made.
        """
        table = self._table()
        share = np.modf(np.arange(1, len(made) + 1) * 0.6180339887498949)[0]
        unknown: NDArray[np.float64] = np.maximum(made, 64.0) * (0.25 + 1.5 * share)
        if len(table) < len(made):
            return unknown
        above = np.searchsorted(table, made, side="right")
        count = len(table) - above
        index = np.minimum(above + (share * count).astype(np.int64), len(table) - 1)
        left: NDArray[np.float64] = np.where(count > 0, table[index] - made, unknown)
        return left

    def _table(self) -> NDArray[np.float64]:
        if self._sorted is None:
            self._sorted = np.sort(np.asarray(self._lengths, dtype=np.float64))
        return self._sorted
