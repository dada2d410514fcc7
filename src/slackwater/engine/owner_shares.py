"""Whose tokens a step computes, where several owners have requests: so that one's many do not slow another's few.

A step takes about a + b * tokens; both are learned from the steps made. While several owners are about, a step is kept so short that it takes
little longer than one for the owner with least to do would take: a quarter longer for every other owner. Within that, owners get equal shares,
and what one leaves the others take. An owner counts as being about for a while after its last request, or its next one would
meet a long step under way. Where a step's fixed part outweighs its tokens, as on a GPU, nobody is held back.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

ABOUT_S = 2.0
_LONGER = 0.25  # for every other owner
_FORGET = 0.98  # of what earlier steps said, per step
_LEAST_SPREAD = 4.0  # of token counts (variance), before a slope can be told


class StepLaw:
    """Seconds of a step by its tokens: a straight line through what was seen of late."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._n = self._n * _FORGET + 1
        self._x = self._x * _FORGET + tokens
        self._y = self._y * _FORGET + seconds
        self._xx = self._xx * _FORGET + tokens * tokens
        self._xy = self._xy * _FORGET + tokens * seconds

    def most_tokens(self, least: int, longer: float) -> int | None:
        """How many may be in a step that takes `1 + longer` times as long as one of `least`; None: not known, or any number."""
        if self._n < 8:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread < _LEAST_SPREAD:
            return None
        slope = (self._xy / self._n - mean_x * mean_y) / spread
        if slope <= 0:
            return None
        fixed = max(mean_y - slope * mean_x, 0.0)
        return int((1 + longer) * least + longer * fixed / slope)


class OwnerShares:
    """`share` cuts a step's counts; `computed` is told what was made of it and how long it took."""

    def __init__(self) -> None:
        self.law = StepLaw()
        self._running: Counter[str] = Counter()
        self._seen_s: dict[str, float] = {}
        self._last_step: dict[int, int] = {}
        self._step = 0

    def entered(self, owner: str) -> None:
        """A request of the owner's runs from here on."""
        self._running[owner] += 1

    def left(self, owner: str, row: int) -> None:
        """And no more."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._last_step.pop(row, None)

    def several(self, now_s: float) -> bool:
        """Whether more than one owner is about. To be asked at every step."""
        for owner in self._running:
            self._seen_s[owner] = now_s
        if len(self._seen_s) > 1:
            gone = [owner for owner, seen_s in self._seen_s.items() if now_s - seen_s > ABOUT_S]
            for owner in gone:
                del self._seen_s[owner]
        return self.shared

    @property
    def shared(self) -> bool:
        """As `several` last found."""
        return len(self._seen_s) > 1

    def share(self, owners: Sequence[str], rows: Sequence[int], counts: NDArray[np.int64]) -> None:
        """Cut `counts`, in place, to what the step may take; `rows` are requests by their order of arrival."""
        wants: Counter[str] = Counter()
        for owner, count in zip(owners, counts.tolist(), strict=True):
            if count:
                wants[owner] += count
        if not wants:
            return
        about = len(self._seen_s)
        least = min(wants.values()) if len(wants) == about else 1
        most = self.law.most_tokens(least, _LONGER * (about - 1))
        if most is None or wants.total() <= most:
            return
        most = max(most, least * len(wants))  # the one with least to do is never cut
        for owner, allowed in even_shares(wants, most).items():
            if allowed < wants[owner]:
                self._cut(owner, allowed, owners, rows, counts)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step was made."""
        self._step += 1
        self.law.add(tokens, seconds)

    def served(self, rows: Sequence[int]) -> None:
        """These were in it."""
        for row in rows:
            self._last_step[row] = self._step

    def _cut(
        self,
        owner: str,
        allowed: int,
        owners: Sequence[str],
        rows: Sequence[int],
        counts: NDArray[np.int64],
    ) -> None:
        """Those that were not served for longest go first."""
        places = [place for place, whose in enumerate(owners) if whose == owner and counts[place]]
        places.sort(key=lambda place: (self._last_step.get(rows[place], 0), rows[place]))
        for place in places:
            counts[place] = min(int(counts[place]), allowed)
            allowed -= int(counts[place])


def even_shares(wants: Mapping[str, int], total: int) -> dict[str, int]:
    """Everybody gets what it wants up to an equal share; what one leaves the others take."""
    shares: dict[str, int] = {}
    left, owners_left = total, len(wants)
    for owner, want in sorted(wants.items(), key=lambda item: (item[1], item[0])):
        shares[owner] = min(want, left // owners_left)
        left -= shares[owner]
        owners_left -= 1
    return shares
