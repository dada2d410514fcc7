"""How long responses turn out, learned from those that ended: what an unfinished one still has to go."""

from collections import deque

import numpy as np
from numpy.typing import NDArray


class LengthLaw:
    """The lengths of the last `keep` responses, as an empirical distribution."""

    def __init__(self, keep: int = 4096) -> None:
        self._lengths: deque[int] = deque(maxlen=keep)
        self._sorted: NDArray[np.float64] | None = None
        self._suffix: NDArray[np.float64] = np.zeros(1)

    def __len__(self) -> int:
        return len(self._lengths)

    def observe(self, tokens: int) -> None:
        """One more response ended."""
        self._lengths.append(tokens)
        if len(self._lengths) % 64 == 0:
            self._sorted = None

    @property
    def longest(self) -> int:
        """The longest seen."""
        return int(self._table()[-1]) if self._lengths else 0

    @property
    def mean(self) -> float:
        """The mean length seen."""
        return float(self._table().mean()) if self._lengths else 0.0

    def expected_left(self, made: NDArray[np.float64]) -> NDArray[np.float64]:
        """E[length - made | length > made] for each; half of the longest if none was ever that long."""
        table = self._table()
        above = np.searchsorted(table, made, side="right")
        count = len(table) - above
        mean_above = self._suffix[above] / np.maximum(count, 1)
        unknown = np.full_like(made, max(self.longest, 1) / 2)
        left: NDArray[np.float64] = np.where(count > 0, mean_above - made, unknown)
        return left

    def _table(self) -> NDArray[np.float64]:
        if self._sorted is None:
            self._sorted = np.sort(np.asarray(self._lengths, dtype=np.float64))
            self._suffix = np.append(np.cumsum(self._sorted[::-1])[::-1], 0.0)
        return self._sorted
