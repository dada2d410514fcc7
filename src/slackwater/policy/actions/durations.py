"""Distributions of action durations, by kind: among those that ran as long, how long did they go
on? A mean would say that an action which has outlived it ends at once.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

_KEPT = 512
_LEAST_SEEN = 3  # fewer than these are an anecdote
_MOST_KINDS = 4096


class DurationDistribution:
    """The last `_KEPT` durations of one kind, on one unit."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_KEPT)
        self._sum = 0.0
        self._sorted: NDArray[np.float64] | None = None
        self._after: NDArray[np.float64] | None = None
        self._unsorted = 0

    def __len__(self) -> int:
        return len(self._seen)

    def observe(self, seconds: float) -> None:
        """One more ended."""
        if len(self._seen) == _KEPT:
            self._sum -= self._seen[0]
        self._seen.append(seconds)
        self._sum += seconds
        self._unsorted += 1
        if len(self._seen) < 64 or self._unsorted >= 32:
            self._sorted = None

    @property
    def mean_s(self) -> float:
        return max(self._sum, 0.0) / len(self._seen)

    def estimate_left_s(self, ran_s: float) -> float:
        """The expected rest after `ran_s`; what outlived all others lasts as long again."""
        if self._sorted is None:
            self._unsorted = 0
            self._sorted = np.sort(np.array(self._seen))
            self._after = np.cumsum(self._sorted[::-1])[::-1]
        assert self._after is not None
        above = int(np.searchsorted(self._sorted, ran_s, side="right"))
        count = len(self._sorted) - above
        if count == 0:
            return max(ran_s, float(self._sorted[-1]) * 0.1)
        return float(self._after[above]) / count - ran_s


class DurationEstimator:
    """The laws of all kinds; `guess_s` stands for a kind of which nothing is known."""

    def __init__(self, guess_s: float) -> None:
        self._laws: dict[str, DurationDistribution] = {}
        self._guess_s = guess_s

    def observe(self, kind: str, single_unit_s: float) -> None:
        """An action of this kind ended, and would have taken so long on one unit."""
        law = self._laws.get(kind)
        if law is None:
            if len(self._laws) >= _MOST_KINDS:
                del self._laws[next(iter(self._laws))]  # the oldest label: memory is bounded
            law = self._laws[kind] = DurationDistribution()
        law.observe(single_unit_s)

    def mean_s(self, kind: str) -> float | None:
        """On one unit; None as long as too few have been seen."""
        law = self._laws.get(kind)
        return law.mean_s if law is not None and len(law) >= _LEAST_SEEN else None

    def guess_s(self, kind: str) -> float:
        """The mean of however few were seen, or of nothing at all."""
        law = self._laws.get(kind)
        return law.mean_s if law is not None else self._guess_s

    def estimate_left_s(self, kind: str, ran_s: float) -> float:
        """The expected rest on one unit of an action that has used `ran_s` of it already."""
        law = self._laws.get(kind)
        if law is None:
            return max(self._guess_s, ran_s)
        return law.estimate_left_s(ran_s)
