"""Fair shares of a step between owners: many requests of one do not slow the few of another.

A step takes about a + b * tokens, learned from measured steps, some of them kept short for this.
With several active owners a step may take a tenth longer, per further owner, than one for the owner
with the least work. Within that owners get equal shares, and unused shares go to others. An owner
stays active for a while after its last request: its next one would wait for a step under way, so a
step may take half longer until then, but not more. Where a step's fixed part outweighs its tokens,
as on a GPU, no owner is throttled.

Prompts are also charged by time, since they leave the path of pure decoding: an owner whose prompts
took more than the others' waits with the next one until others have decoded for ten times as long,
or twice while one of them has no request.
Owners with equally many prompts do not throttle each other, and an owner's only request does not
wait: a prompt that was cut in two would wait between its parts.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

ACTIVE_S = 2.0
# Allowed slowdown of a step, per further owner: every step delays a request that runs, and only one
# step delays a request that comes.
_LONGER, _LONGER_BEFORE = 0.1, 0.5
_SHORT_EVERY = 64  # steps between two short ones while owners are throttled
_SHORT_SELDOM = 1024  # steps between two short ones otherwise
_GROWTH = 2  # most tokens of a step, relative to the last long one
_SHORT_WEIGHT, _LONG_WEIGHT = 0.1, 0.05  # of the newest step in the moving average
# A slow step may have been delayed by other work; a fast one is certainly what the device can do.
_FAST_WEIGHT = 3.0  # a step that is faster than expected counts this many times as much
_MOST_OWED = 8.0  # for prompts, relative to a short decode step
_OUTLIER = 2.0  # a slower step counts as at most this many times the expected time


class _Mean:
    """Moving averages of the tokens and seconds of one kind of step."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self.tokens = self.seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        weight = self._weight
        if not self.tokens:
            weight = 1.0
        else:
            expected_s = self.seconds * max(tokens / self.tokens, 1.0)
            if seconds < expected_s:
                weight *= _FAST_WEIGHT
            seconds = min(seconds, _OUTLIER * expected_s)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


class StepTimeModel:
    """Seconds of a step by its tokens: the line through recent short steps and recent long ones.
    Every now and then a step is kept short, since steps of equal size determine no line; none has
    more than twice the tokens of the last long one, so that a wrong line costs little.
    """

    def __init__(self) -> None:
        self._short, self._long = _Mean(_SHORT_WEIGHT), _Mean(_LONG_WEIGHT)
        self._floor = self._last_long = self._since_short = 0
        self._short_every = _SHORT_EVERY

    @property
    def short_step_s(self) -> float:
        return self._short.seconds

    def add(self, tokens: int, seconds: float) -> None:
        if tokens <= self._floor:
            self._since_short = 0
            self._short.add(tokens, seconds)
        else:
            self._since_short += 1
            self._long.add(tokens, seconds)
            self._last_long = tokens

    def most_tokens(self, least: int, longer: float, floor: int, wanted: int) -> int:
        """How many tokens, at least `floor`, fit a step `1 + longer` times as long as `least`'s."""
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
        self._short_every = _SHORT_EVERY if most < wanted else _SHORT_SELDOM
        return max(most, floor)


class OwnerShares:
    """`share` cuts a step's token counts; `step_time` learns from steps with one token per row.

    State is kept in arrays by slot: a step of a small model takes a fifth of a millisecond, and
    finding the owners of its rows must not lengthen it.
    """

    def __init__(self, slots: int) -> None:
        self.step_time = StepTimeModel()
        self._codes: dict[str, int] = {}
        self._running: Counter[str] = Counter()
        self._last_seen_s: dict[str, float] = {}
        self._owner = np.zeros(slots, np.int64)
        self._arrival = np.zeros(slots, np.int64)
        self._last_step = np.zeros(slots, np.int64)
        self._arrivals = self._step = 0
        self._prompt_s: dict[str, float] = {}  # what an owner's prompts took beyond its allowance

    def add_request(self, slot: int, owner: str) -> None:
        self._running[owner] += 1
        self._owner[slot] = self._codes.setdefault(owner, len(self._codes))
        self._arrivals += 1
        self._arrival[slot], self._last_step[slot] = self._arrivals, 0

    def remove_request(self, owner: str) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]

    def num_running(self, owner: str) -> int:
        return self._running[owner]

    def refresh_active_owners(self, now_s: float) -> bool:
        """Update which owners are active, at every step; whether there are several."""
        for owner in self._running:
            self._last_seen_s[owner] = now_s
        if len(self._last_seen_s) > 1:
            oldest_s = now_s - ACTIVE_S
            self._last_seen_s = {o: s for o, s in self._last_seen_s.items() if s >= oldest_s}
        return self.has_several_owners

    @property
    def has_several_owners(self) -> bool:
        """As `refresh_active_owners` last found."""
        return len(self._last_seen_s) > 1

    @property
    def _allowed_slowdown(self) -> float:
        """Per further owner; more while one of them has no request."""
        return _LONGER if len(self._running) == len(self._last_seen_s) else _LONGER_BEFORE

    def share(
        self,
        slots: NDArray[np.int64],
        counts: NDArray[np.int64],
        delayed: frozenset[int] = frozenset(),
    ) -> bool:
        """Cut each slot's `counts`, in place, to what fits the step; whether anything was cut.

        Owners of `delayed` slots have work too, though none in this step.
        """
        owner = self._owner[slots]
        sums = np.bincount(owner, counts)
        wants = {code: int(sums[code]) for code in np.flatnonzero(sums).tolist()}
        if not wants:
            return False
        active = len(self._last_seen_s)
        at_work = wants.keys() | {int(self._owner[slot]) for slot in delayed}
        least = min(wants.values()) if len(at_work) == active else 1
        floor = least * len(wants)  # the owner with the least work is never cut
        wanted = sum(wants.values())
        longer = self._allowed_slowdown * (active - 1)
        most = self.step_time.most_tokens(least, longer, floor, wanted)
        if wanted <= most:
            return False
        for code, allowed in even_shares(wants, most).items():
            if allowed < wants[code]:
                self._cut(np.flatnonzero((owner == code) & (counts > 0)), allowed, slots, counts)
        return True

    def charge_prompts(self, tokens: Mapping[str, int], seconds: float) -> None:
        """Charge a step to the owners of the prompt tokens in it (none: a pure decode step).

        All are allowed a share of the time that passes, and what the active owner with the fewest
        prompts used. What an owner owes is limited, since a step that compiles a kernel takes
        seconds: to nothing but the next step until a short step's time is known.
        """
        charged, total = self._prompt_s, sum(tokens.values())
        if not charged and not total:
            return
        if total:
            for owner, count in tokens.items():
                charged[owner] = charged.get(owner, 0.0) + seconds * count / total
            allowed_s = min(charged.get(owner, 0.0) for owner in self._last_seen_s)
        else:
            allowed_s = seconds * self._allowed_slowdown
        most_s = _MOST_OWED * self.step_time.short_step_s
        self._prompt_s = {
            o: min(s - allowed_s, most_s) for o, s in charged.items() if s > allowed_s
        }

    def must_delay_prompts(self, owner: str) -> bool:
        """Whether an owner's prompts have lately taken more time than those of another one."""
        return owner in self._prompt_s and self._running[owner] > 1

    def mark_served(self, slots: NDArray[np.int64]) -> None:
        self._step += 1
        self._last_step[slots] = self._step

    def _cut(
        self,
        rows: NDArray[np.int64],
        allowed: int,
        slots: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        """Prefer rows that have waited longest since their last step, then older requests."""
        row_slots = slots[rows]
        rows = rows[np.lexsort((self._arrival[row_slots], self._last_step[row_slots]))]
        wanted = counts[rows]
        counts[rows] = np.clip(allowed - (np.cumsum(wanted) - wanted), 0, wanted)


T = TypeVar("T", str, int)


def even_shares(wants: Mapping[T, int], total: int) -> dict[T, int]:
    """Each owner gets what it wants up to an equal share; unused shares go to the others."""
    shares: dict[T, int] = {}
    left, owners_left = total, len(wants)
    for owner, want in sorted(wants.items(), key=lambda item: (item[1], item[0])):
        shares[owner] = min(want, left // owners_left)
        left -= shares[owner]
        owners_left -= 1
    return shares
