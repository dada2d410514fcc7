"""Whose tokens a step computes, where several owners have requests: so that one's many do not slow another's few.

A step takes about a + b * tokens; both are learned from the steps made. While several owners are about, a step is kept so short that it takes
little longer than one for the owner with least to do would take: a quarter longer for every other owner. Within that, owners get equal shares,
and what one leaves the others take. An owner counts as being about for a while after its last request, or its next one would
meet a long step under way. Where a step's fixed part outweighs its tokens, as on a GPU, nobody is held back.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

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
    """`share` cuts a step's counts; `computed` is told what was made of it and how long it took.

    Rows are slots of the engine, and what is known of them lies in arrays: a step of a small model takes a fifth of a millisecond, and finding out whose it is must
    not lengthen it.
    """

    def __init__(self, slots: int) -> None:
        self.law = StepLaw()
        self._codes: dict[str, int] = {}
        self._running: Counter[str] = Counter()
        self._seen_s: dict[str, float] = {}
        self._owner = np.zeros(slots, np.int64)
        self._arrival = np.zeros(slots, np.int64)
        self._last_step = np.zeros(slots, np.int64)
        self._arrivals = self._step = 0

    def entered(self, slot: int, owner: str) -> None:
        """A request of the owner's runs in the slot from here on."""
        self._running[owner] += 1
        self._owner[slot] = self._codes.setdefault(owner, len(self._codes))
        self._arrivals += 1
        self._arrival[slot], self._last_step[slot] = self._arrivals, 0

    def left(self, owner: str) -> None:
        """And one of them no more."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]

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

    def share(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Cut `counts`, of the tokens of each slot, in place, to what the step may take."""
        owner = self._owner[slots]
        sums = np.bincount(owner, counts)
        wants = {code: int(sums[code]) for code in np.flatnonzero(sums).tolist()}
        if not wants:
            return
        about = len(self._seen_s)
        least = min(wants.values()) if len(wants) == about else 1
        most = self.law.most_tokens(least, _LONGER * (about - 1))
        if most is None or sum(wants.values()) <= most:
            return
        most = max(most, least * len(wants))  # the one with least to do is never cut
        for code, allowed in even_shares(wants, most).items():
            if allowed < wants[code]:
                self._cut(np.flatnonzero((owner == code) & (counts > 0)), allowed, slots, counts)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step was made."""
        self._step += 1
        self.law.add(tokens, seconds)

    def served(self, slots: NDArray[np.int64]) -> None:
        """These were in it."""
        self._last_step[slots] = self._step

    def _cut(
        self,
        places: NDArray[np.int64],
        allowed: int,
        slots: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        """Those that were not served for longest go first, then those that came first."""
        rows = slots[places]
        places = places[np.lexsort((self._arrival[rows], self._last_step[rows]))]
        wanted = counts[places]
        counts[places] = np.clip(allowed - (np.cumsum(wanted) - wanted), 0, wanted)


T = TypeVar("T", str, int)


def even_shares(wants: Mapping[T, int], total: int) -> dict[T, int]:
    """Everybody gets what it wants up to an equal share; what one leaves the others take."""
    shares: dict[T, int] = {}
    left, owners_left = total, len(wants)
    for owner, want in sorted(wants.items(), key=lambda item: (item[1], item[0])):
        shares[owner] = min(want, left // owners_left)
        left -= shares[owner]
        owners_left -= 1
    return shares
