"""Distributions of action durations by kind. They predict the rest of a running action from the
actions that ran at least as long. A mean would predict that an action which exceeds it ends at
once.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

_KEPT = 512
_LEAST_SEEN = 3  # with fewer, the mean counts as unknown
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
        """The expected remaining time after `ran_s`. An action that outlived all others is expected
        to take as long again.
        """
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
    """The distributions of all kinds. `guess_s` is the duration of an unknown kind."""

    def __init__(self, guess_s: float) -> None:
        self._laws: dict[str, DurationDistribution] = {}
        self._guess_s = guess_s

    def observe(self, kind: str, single_unit_s: float) -> None:
        law = self._laws.get(kind)
        if law is None:
            if len(self._laws) >= _MOST_KINDS:
                del self._laws[next(iter(self._laws))]  # the oldest kind, to bound memory
            law = self._laws[kind] = DurationDistribution()
        law.observe(single_unit_s)

    def mean_s(self, kind: str) -> float | None:
        """The mean duration on one unit; None while too few are known."""
        law = self._laws.get(kind)
        return law.mean_s if law is not None and len(law) >= _LEAST_SEEN else None

    def guess_s(self, kind: str) -> float:
        """The mean duration, however few are known, or the default guess."""
        law = self._laws.get(kind)
        return law.mean_s if law is not None else self._guess_s

    def estimate_left_s(self, kind: str, ran_s: float) -> float:
        """The expected remaining time on one unit of an action that ran for `ran_s` on one unit."""
        law = self._laws.get(kind)
        if law is None:
            return max(self._guess_s, ran_s)
        return law.estimate_left_s(ran_s)
