"""The fleet's timeline as lanes of spans, cut into windows that a browser can draw.

A window holds what is visible and no more: spans shorter than two pixels are merged into bins on
the server, so that a day of a thousand devices costs as much to send as a minute of ten.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = ("rollout", "train", "sync", "switch", "tail", "fault")
ROLLOUT, TRAIN, SYNC, SWITCH, TAIL, FAULT = range(len(KINDS))

_MAX_LANE_SPANS = 20_000  # of a live lane; the oldest half goes
_BIN_PIXELS = 2
_OVERVIEW_BINS = 300
_LOOK_BACK = 8  # spans that began before a window and may reach into it: a tail beside a run


@dataclass(slots=True)
class TimelineLane:
    """One device's or worker's time. `rented_s` are the stretches in which it existed."""

    name: str
    pool: str
    rented_s: list[tuple[float, float | None]] = field(default_factory=list)
    starts_s: "array[float]" = field(default_factory=lambda: array("d"))
    ends_s: "array[float]" = field(default_factory=lambda: array("d"))
    jobs: "array[int]" = field(default_factory=lambda: array("i"))
    kinds: "array[int]" = field(default_factory=lambda: array("b"))

    def forget_half(self) -> None:
        half = len(self.starts_s) // 2
        for column in (self.starts_s, self.ends_s, self.jobs, self.kinds):
            del column[:half]


@dataclass(frozen=True, slots=True)
class TimelineWindow:
    """What a browser shows: a stretch of time, so many pixels wide, and some of the lanes."""

    start_s: float
    end_s: float
    width: int
    first: int
    count: int


class LaneTimeline:
    """Lanes in the order in which they are shown; spans of a lane are added in order of start."""

    def __init__(self) -> None:
        self._lanes: dict[str, TimelineLane] = {}
        self._numbers: dict[str, int] = {}
        self.jobs: list[str] = []
        self.open: dict[str, tuple[int, int, float]] = {}  # lane -> job, kind, start

    def lane(self, name: str, pool: str) -> TimelineLane:
        """The lane of that name, new if it is not known."""
        if name not in self._lanes:
            self._lanes[name] = TimelineLane(name, pool)
        return self._lanes[name]

    def lanes(self) -> list[TimelineLane]:
        return list(self._lanes.values())

    def forget_gone(self, most: int) -> None:
        """Of more lanes than that, those that have been gone longest are dropped."""
        if len(self._lanes) <= most:
            return
        gone = [lane for lane in self.lanes() if lane.rented_s and lane.rented_s[-1][1] is not None]
        gone.sort(key=lambda lane: lane.rented_s[-1][1] or 0.0)
        for lane in gone[: len(self._lanes) - most]:
            del self._lanes[lane.name]

    def job_number(self, job: str) -> int:
        """Its place in `jobs`, which is also its colour."""
        if job not in self._numbers:
            self._numbers[job] = len(self.jobs)
            self.jobs.append(job)
        return self._numbers[job]

    def add(self, lane: TimelineLane, job: str, kind: int, start_s: float, end_s: float) -> None:
        if len(lane.starts_s) >= _MAX_LANE_SPANS:
            lane.forget_half()
        self.append(lane, self.job_number(job), kind, start_s, end_s)

    @staticmethod
    def append(lane: TimelineLane, job: int, kind: int, start_s: float, end_s: float) -> None:
        lane.starts_s.append(start_s)
        lane.ends_s.append(end_s)
        lane.jobs.append(job)
        lane.kinds.append(kind)

    def begin(self, lane: TimelineLane, job: str, kind: int, now_s: float) -> None:
        """The lane works on this from now on; a span of something else ends."""
        before = self.open.get(lane.name)
        number = self.job_number(job)
        if before is not None and before[:2] == (number, kind):
            return
        self.end(lane, now_s)
        self.open[lane.name] = (number, kind, now_s)

    def end(self, lane: TimelineLane, now_s: float) -> None:
        """The lane is idle from now on."""
        before = self.open.pop(lane.name, None)
        if before is not None:
            self.add(lane, self.jobs[before[0]], before[1], before[2], now_s)

    # ---- what is drawn ----
    def window(
        self, asked: TimelineWindow, now_s: float, visible: Callable[[str], bool] | None = None
    ) -> dict[str, Any]:
        """`visible` keeps others' jobs from a tenant. Entries are start, end, job, kind and the
        busy share in percent, five numbers each.
        """
        lanes = self.lanes()
        hidden = self._hidden(visible)
        chosen = lanes[asked.first : asked.first + asked.count]
        return {
            "start_s": asked.start_s,
            "end_s": asked.end_s,
            "now_s": now_s,
            "first": asked.first,
            "lanes": [[lane.name, lane.pool] for lane in lanes],
            "jobs": [None if number in hidden else job for number, job in enumerate(self.jobs)],
            "rows": [self._row(lane, asked, now_s, hidden) for lane in chosen],
        }

    def _hidden(self, visible: Callable[[str], bool] | None) -> set[int]:
        if visible is None:
            return set()
        return {number for number, job in enumerate(self.jobs) if not visible(job)}

    def _row(
        self, lane: TimelineLane, asked: TimelineWindow, now_s: float, hidden: set[int]
    ) -> dict[str, Any]:
        start_s, end_s = asked.start_s, asked.end_s
        first = max(bisect_right(lane.starts_s, start_s) - _LOOK_BACK, 0)
        last = bisect_left(lane.starts_s, end_s)
        if last - first > asked.width // _BIN_PIXELS:
            entries = _binned(lane, first, last, asked)
        else:
            entries = [
                value
                for place in range(first, last)
                if lane.ends_s[place] >= start_s
                for value in (
                    round(lane.starts_s[place], 3),
                    round(lane.ends_s[place], 3),
                    *(lane.jobs[place], lane.kinds[place], 100),
                )
            ]
        if (running := self.open.get(lane.name)) is not None and running[2] < end_s:
            entries += [round(running[2], 3), round(now_s, 3), running[0], running[1], 100]
        rents = [
            [round(since_s, 3), round(now_s if until_s is None else until_s, 3)]
            for since_s, until_s in lane.rented_s
            if since_s < end_s and (until_s is None or until_s > start_s)
        ]
        return {"rents": rents, "spans": _without(entries, hidden)}

    def overview(
        self, end_s: float, visible: Callable[[str], bool] | None = None
    ) -> dict[str, Any]:
        """The share of all lanes that rolls out, trains or does something else, over the run."""
        edges_s = np.linspace(0.0, max(end_s, 1e-3), _OVERVIEW_BINS + 1)
        hidden = np.array(sorted(self._hidden(visible)), dtype=np.int64)
        parts: dict[int, list[NDArray[np.float64]]] = {ROLLOUT: [], TRAIN: [], SYNC: []}
        for lane in self._lanes.values():
            starts_s, ends_s = np.array(lane.starts_s), np.array(lane.ends_s)
            kinds, jobs = np.array(lane.kinds), np.array(lane.jobs)
            shown = ~np.isin(jobs, hidden) if hidden.size else np.ones(len(jobs), bool)
            for kind, found in parts.items():
                mine = shown & (kinds == kind)
                found.append(np.stack([starts_s[mine], ends_s[mine]]))
        lanes = max(len(self._lanes), 1)
        shares = {
            KINDS[kind]: _coverage(np.concatenate(found, axis=1), edges_s) / lanes
            for kind, found in parts.items()
            if found
        }
        series = {name: np.round(share, 4).tolist() for name, share in shares.items()}
        return {"end_s": end_s, "series": series}


def _coverage(spans_s: NDArray[np.float64], edges_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many spans cover each stretch between two edges, on the mean."""

    def grown(points_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of max(edge - point, 0) at every edge."""
        ordered = np.sort(points_s)
        before = np.searchsorted(ordered, edges_s)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        total: NDArray[np.float64] = before * edges_s - sums[before]
        return total

    covered = np.diff(grown(spans_s[0]) - grown(spans_s[1])) / np.diff(edges_s)
    return np.clip(covered, 0.0, None)


def _binned(lane: TimelineLane, first: int, last: int, asked: TimelineWindow) -> list[float]:
    """Long spans as they are; of the short ones in a bin the longest one's job, and how much of the
    bin all of them cover.
    """
    bins = max(asked.width // _BIN_PIXELS, 1)
    bin_s = (asked.end_s - asked.start_s) / bins
    starts_s, ends_s = np.array(lane.starts_s[first:last]), np.array(lane.ends_s[first:last])
    jobs, kinds = np.array(lane.jobs[first:last]), np.array(lane.kinds[first:last])
    length_s = ends_s - starts_s
    is_long = (length_s > bin_s) | (kinds == FAULT)
    entries: list[float] = []
    for place in np.flatnonzero(is_long & (ends_s >= asked.start_s)):
        span = (round(float(starts_s[place]), 3), round(float(ends_s[place]), 3))
        entries += [*span, int(jobs[place]), int(kinds[place]), 100]
    middle_s = (starts_s + ends_s) / 2 - asked.start_s
    at = np.floor(middle_s / bin_s).astype(np.int64)
    short = np.flatnonzero(~is_long & (at >= 0) & (at < bins))
    covered_s = np.bincount(at[short], weights=length_s[short], minlength=bins)
    order = short[np.lexsort((length_s[short], at[short]))]
    for place in order[np.flatnonzero(np.diff(at[order], append=-1))]:  # the longest of each bin
        number = int(at[place])
        share = min(round(100 * float(covered_s[number]) / bin_s), 100)
        begin_s = asked.start_s + number * bin_s
        span = (round(begin_s, 3), round(begin_s + bin_s, 3))
        entries += [*span, int(jobs[place]), int(kinds[place]), share]
    return entries


def _without(entries: list[float], hidden: set[int]) -> list[float]:
    if not hidden:
        return entries
    starts = [at for at in range(0, len(entries), 5) if int(entries[at + 2]) not in hidden]
    return [value for at in starts for value in entries[at : at + 5]]
