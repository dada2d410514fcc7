"""The KV cache that a job's started trajectories will need, learned from how they grow, return and
end.

If too many are started at once they evict each other from the caches; too few leave engines idle.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

BINS = 32
_ENOUGH = 16  # changes after which derived tables are computed again
_KEPT = 512  # turns and pauses that count


def empty_working_set() -> Tokens:
    """The expected tokens of an instance without trajectories: means and variances by bins of
    growth.
    """
    return np.zeros((2, BINS), dtype=np.int64)


def peak_tokens(tokens: Tokens) -> float:
    """The largest expected size of a working set as it grows, plus one standard deviation."""
    return float((tokens[0] + np.sqrt(tokens[1])).max())


@lru_cache(maxsize=64)
def _grid(width: float) -> NDArray[np.float64]:
    """The lower ends of the bins, in tokens."""
    return np.arange(BINS, dtype=np.float64) * np.float64(width)


class ContextGrowth:
    """How the contexts of one job grow, and how long its pauses between turns are.

    For each bin of context length it estimates which share of the contexts that reached the bin
    continued beyond it (Kaplan and Meier). Without data all contexts are assumed to continue.
    """

    def __init__(self, longest_tokens: int) -> None:
        self._width = max(longest_tokens / BINS, 1.0)
        self._passed = [0] * BINS
        self._ended = [0] * BINS
        self._turn_tokens = 0.0
        self._turns = 0
        self._pauses_s: list[float] = []
        self._sorted_s: NDArray[np.float64] | None = None
        self._returns = 0
        self._ends = 0
        self._stays: NDArray[np.float64] | None = None
        self._news = 0

    def record_growth(self, before_tokens: int, after_tokens: int) -> None:
        """Record a turn that extended a context."""
        first, last = self._bin(before_tokens), self._bin(after_tokens)
        for place in range(first, last):
            self._passed[place] += 1
        self._turns += 1
        grown = max(after_tokens - before_tokens, 0)
        self._turn_tokens += (grown - self._turn_tokens) / min(self._turns, _KEPT)
        if last > first:
            self._count_changes(last - first)

    def record_end(self, context_tokens: int) -> None:
        """Record that a trajectory probably ended with this context."""
        self._ended[self._bin(context_tokens)] += 1
        self._ends += 1
        self._count_changes(1)

    def undo_end(self, context_tokens: int) -> None:
        """Take back `record_end` for a trajectory that continued."""
        self._ended[self._bin(context_tokens)] -= 1
        self._ends -= 1
        self._count_changes(1)

    def record_return(self, pause_s: float) -> None:
        """Record the pause before a trajectory's next turn."""
        self._returns += 1
        self._pauses_s.append(pause_s)
        if len(self._pauses_s) > _KEPT:
            del self._pauses_s[0]
        if self._returns % _ENOUGH == 0:
            self._sorted_s = None

    def _count_changes(self, news: int) -> None:
        self._news += news
        if self._news >= _ENOUGH:
            self._stays, self._news = None, 0

    @property
    def usually_returns(self) -> bool:
        """Whether a trajectory whose turn has ended is more likely to return than not."""
        return self._returns > self._ends

    def estimate_pause_s(self, alive: float, longest_s: float) -> float:
        """The pause after which a trajectory still continues with probability `alive` (Bayes)."""
        if not self.usually_returns:
            return 0.0
        if self._sorted_s is None:
            self._sorted_s = np.sort(np.asarray(self._pauses_s))
        longer = (self._ends + 1) / (self._returns + 1) * alive / (1.0 - alive)
        index = int(len(self._sorted_s) * (1.0 - longer))
        if index >= len(self._sorted_s):
            return longest_s
        return min(float(self._sorted_s[max(index, 0)]), longest_s)

    def forecast_tokens(self, context_tokens: int, alive: float = 1.0) -> Tokens:
        """The expected tokens of a trajectory as it grows by 0, 1, 2, ... bins (0
        once it has ended), and their variances. It continues with probability `alive`.
        """
        if self._stays is None:
            passed = np.array(self._passed, np.float64)
            at_risk = passed + self._ended
            self._stays = np.where(at_risk > 0, passed / np.maximum(at_risk, 1.0), 1.0)
        first = self._bin(context_tokens)
        lives = np.zeros(BINS)
        lives[0] = alive
        lives[1 : BINS - first] = alive * np.cumprod(self._stays[first : BINS - 1])
        # Include the next turn, which must fit beside all others.
        held = context_tokens + int(self._turn_tokens) + _grid(self._width)
        tokens: Tokens = np.array((held * lives, held * held * lives * (1.0 - lives)), np.int64)
        return tokens

    def _bin(self, tokens: int) -> int:
        return min(int(tokens / self._width), BINS - 1)
