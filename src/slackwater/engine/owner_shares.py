"""Whose tokens a step computes, where several owners have requests: so that one's many do not slow
another's few.

A step takes about a + b * tokens; both are learned from the steps made, and from some that are kept
short for it. While several owners are about, a step is kept so short that it takes little longer
than one for the owner with least to do would take: a quarter longer for every other owner. Within
that, owners get equal shares, and what one leaves the others take. An owner counts as being about
for a while after its last request, or its next one would meet a long step under way. Where a step's
fixed part outweighs its tokens, as on a GPU, nobody is held back.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

ABOUT_S = 2.0
_LONGER = 0.25  # for every other owner
_SHORT_EVERY, _SELDOM = 64, 1024  # steps; where nobody has to be held back
_GROWTH = 2  # of a step over those before
_OF_SHORT, _OF_LONG = 0.1, 0.05  # how much the newest step says of the mean
# A step that took long may have been held up; one that took short has not.
_SHORTER, _OUTLIER = 3.0, 2.0  # times as much said; times what was expected, at most


class _Mean:
    """Tokens and seconds of the steps of one kind, mostly of the last few."""

    def __init__(self, newest: float) -> None:
        self._newest = newest
        self.tokens = self.seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        weight = self._newest
        if not self.tokens:
            weight = 1.0
        else:
            expected_s = self.seconds * max(tokens / self.tokens, 1.0)
            if seconds < expected_s:
                weight *= _SHORTER
            seconds = min(seconds, _OUTLIER * expected_s)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


class StepLaw:
    """Seconds of a step by its tokens: the line through the short steps and the others of late.

    Steps that are all alike say nothing about it, and what a token costs grows with the contexts:
    so every now and then a step is short. And no step has more than twice the tokens of the last
    long one, so that a line that is wrong is found out by a step that is little too long.
    """

    def __init__(self) -> None:
        self._short, self._long = _Mean(_OF_SHORT), _Mean(_OF_LONG)
        self._floor = self._last_long = self._since_short = 0
        self._short_every = _SHORT_EVERY

    def add(self, tokens: int, seconds: float) -> None:
        if tokens <= self._floor:
            self._since_short = 0
            self._short.add(tokens, seconds)
        else:
            self._since_short += 1
            self._long.add(tokens, seconds)
            self._last_long = tokens

    def most_tokens(self, least: int, longer: float, floor: int, wanted: int) -> int:
        """How many tokens, at least `floor`, make a step `1 + longer` times as long as `least`."""
        self._floor = floor
        short, long = self._short, self._long
        if not short.tokens or self._since_short >= self._short_every:
            return floor
        if long.tokens < short.tokens + 1:
            return _GROWTH * floor
        most = _GROWTH * max(self._last_long, floor)
        slope = (long.seconds - short.seconds) / (long.tokens - short.tokens)
        if slope > 0:
            fixed = max(short.seconds - slope * short.tokens, 0.0)
            most = min(most, int((1 + longer) * least + longer * fixed / slope))
        self._short_every = _SHORT_EVERY if most < wanted else _SELDOM
        return max(most, floor)


class OwnerShares:
    """`share` cuts a step's counts; `computed` is told what was made of it and how long it took.

    Rows are slots of the engine, and what is known of them lies in arrays: a step of a small model
    takes a fifth of a millisecond, and finding out whose it is must not lengthen it.
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

    def share(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        """Cut each slot's `counts`, in place, to what the step may take; whether that is less."""
        owner = self._owner[slots]
        sums = np.bincount(owner, counts)
        wants = {code: int(sums[code]) for code in np.flatnonzero(sums).tolist()}
        if not wants:
            return False
        about = len(self._seen_s)
        least = min(wants.values()) if len(wants) == about else 1
        floor = least * len(wants)  # the one with least to do is never cut
        wanted = sum(wants.values())
        most = self.law.most_tokens(least, _LONGER * (about - 1), floor, wanted)
        if wanted <= most:
            return False
        for code, allowed in even_shares(wants, most).items():
            if allowed < wants[code]:
                self._cut(np.flatnonzero((owner == code) & (counts > 0)), allowed, slots, counts)
        return True

    def computed(self, tokens: int, seconds: float) -> None:
        """A step was made in which every row had one token."""
        self.law.add(tokens, seconds)

    def served(self, slots: NDArray[np.int64]) -> None:
        self._step += 1
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
