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
    """What a browser shows: a stretch of time, so many pixels wide, and some of the lanes.

    One that has the same window from before asks only for spans that end after `since_s`, and names
    the `names` that it has.
    """

    start_s: float
    end_s: float
    width: int
    first: int
    count: int
    since_s: float | None = None
    names: str = ""

    @property
    def bin_s(self) -> float:
        return (self.end_s - self.start_s) / max(self.width // _BIN_PIXELS, 1)


class LaneTimeline:
    """Lanes in the order in which they are shown; spans of a lane are added in order of start."""

    def __init__(self) -> None:
        self._lanes: dict[str, TimelineLane] = {}
        self._numbers: dict[str, int] = {}
        self.jobs: list[str] = []
        self.open: dict[str, tuple[int, int, float]] = {}  # lane -> job, kind, start
        self._changes = 0  # of the lanes

    def lane(self, name: str, pool: str) -> TimelineLane:
        """The lane of that name, new if it is not known."""
        if name not in self._lanes:
            self._lanes[name] = TimelineLane(name, pool)
            self._changes += 1
        return self._lanes[name]

    def lanes(self) -> list[TimelineLane]:
        return list(self._lanes.values())

    def forget_gone(self, most: int) -> None:
        """Drop the lanes that have been gone longest, beyond `most`."""
        if len(self._lanes) <= most:
            return
        gone = [lane for lane in self.lanes() if lane.rented_s and lane.rented_s[-1][1] is not None]
        gone.sort(key=lambda lane: lane.rented_s[-1][1] or 0.0)
        for lane in gone[: len(self._lanes) - most]:
            del self._lanes[lane.name]
            self._changes += 1

    def job_number(self, job: str) -> int:
        """The job's index in `jobs`, which is also its colour."""
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
        """Begin a span of this job and kind; another open span of the lane ends."""
        before = self.open.get(lane.name)
        number = self.job_number(job)
        if before is not None and before[:2] == (number, kind):
            return
        self.end(lane, now_s)
        self.open[lane.name] = (number, kind, now_s)

    def end(self, lane: TimelineLane, now_s: float) -> None:
        """End the lane's open span."""
        before = self.open.pop(lane.name, None)
        if before is not None:
            self.add(lane, self.jobs[before[0]], before[1], before[2], now_s)

    def spans(self, lane: TimelineLane, now_s: float) -> list[tuple[float, float, int, int]]:
        """Start, end, number of the job and kind of each span; an open one reaches to now."""
        columns = (lane.starts_s, lane.ends_s, lane.jobs, lane.kinds)
        found = list(zip(*columns, strict=True))
        if (running := self.open.get(lane.name)) is not None:
            found.append((running[2], now_s, running[0], running[1]))
        return found

    # ---- windows ----
    def window(
        self, wanted: TimelineWindow, now_s: float, visible: Callable[[str], bool] | None = None
    ) -> dict[str, Any]:
        """`visible` keeps others' jobs from a tenant. Entries are start, end, job, kind and the
        busy share in percent, five numbers each. Names come only where they are new to the browser.
        """
        lanes = self.lanes()
        hidden = self._hide_jobs(visible)
        chosen = lanes[wanted.first : wanted.first + wanted.count]
        cut_s = None
        if wanted.since_s is not None:  # at the edge of a bin, so that bins are whole
            bins = np.floor((wanted.since_s - wanted.start_s) / wanted.bin_s)
            cut_s = wanted.start_s + float(bins) * wanted.bin_s
        names = f"{self._changes}.{len(self.jobs)}"
        found: dict[str, Any] = {
            "start_s": wanted.start_s,
            "end_s": wanted.end_s,
            "now_s": now_s,
            "since_s": cut_s,
            "first": wanted.first,
            "names": names,
            "rows": [self._row(lane, wanted, cut_s, now_s, hidden) for lane in chosen],
        }
        if names != wanted.names:
            found["lanes"] = [[lane.name, lane.pool] for lane in lanes]
            found["jobs"] = [None if n in hidden else job for n, job in enumerate(self.jobs)]
        return found

    def _hide_jobs(self, visible: Callable[[str], bool] | None) -> set[int]:
        if visible is None:
            return set()
        return {number for number, job in enumerate(self.jobs) if not visible(job)}

    def _row(
        self,
        lane: TimelineLane,
        window: TimelineWindow,
        cut_s: float | None,
        now_s: float,
        hidden: set[int],
    ) -> dict[str, Any]:
        start_s, end_s = window.start_s if cut_s is None else cut_s, window.end_s
        first = max(bisect_right(lane.starts_s, start_s) - _LOOK_BACK, 0)
        last = bisect_left(lane.starts_s, end_s)
        if cut_s is None and last - first > window.width // _BIN_PIXELS:
            entries = _bin_spans(lane, first, last, window)
        else:
            entries = _plain(lane, first, last, start_s)
        if (running := self.open.get(lane.name)) is not None and running[2] < end_s:
            entries += [round(running[2], 3), round(now_s, 3), running[0], running[1], 100]
        rents = [
            [round(since_s, 3), round(now_s if until_s is None else until_s, 3)]
            for since_s, until_s in lane.rented_s
            if since_s < end_s and (until_s is None or until_s > window.start_s)
        ]
        return {"rents": rents, "spans": _without(entries, hidden)}

    def overview(self, end_s: float, visible: Callable[[str], bool] | None = None) -> "Overview":
        """An overview without lanes; add them."""
        hidden = np.array(sorted(self._hide_jobs(visible)), dtype=np.int64)
        return Overview(end_s, hidden)


class Overview:
    """The share of all lanes that rolls out, trains or moves weights, over the run."""

    def __init__(self, end_s: float, hidden: NDArray[np.int64]) -> None:
        self._end_s, self._hidden = end_s, hidden
        self._edges_s = np.linspace(0.0, max(end_s, 1e-3), _OVERVIEW_BINS + 1)
        self._covered = {kind: np.zeros(_OVERVIEW_BINS) for kind in (ROLLOUT, TRAIN, SYNC)}
        self._lanes = 0

    def add(self, lane: TimelineLane) -> None:
        starts_s, ends_s = np.array(lane.starts_s), np.array(lane.ends_s)
        kinds, jobs = np.array(lane.kinds), np.array(lane.jobs)
        shown = ~np.isin(jobs, self._hidden) if self._hidden.size else np.ones(len(jobs), bool)
        self._lanes += 1
        for kind, covered in self._covered.items():
            mine = shown & (kinds == kind)
            if mine.any():
                covered += _coverage(np.stack([starts_s[mine], ends_s[mine]]), self._edges_s)

    def figures(self) -> dict[str, Any]:
        lanes = max(self._lanes, 1)
        series = {
            KINDS[kind]: np.round(covered / lanes, 4).tolist()
            for kind, covered in self._covered.items()
        }
        return {"end_s": self._end_s, "series": series}


def _coverage(spans_s: NDArray[np.float64], edges_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many spans cover each stretch between two edges, on the mean."""

    def integrate(points_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of max(edge - point, 0) at every edge."""
        ordered = np.sort(points_s)
        before = np.searchsorted(ordered, edges_s)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        total: NDArray[np.float64] = before * edges_s - sums[before]
        return total

    covered = np.diff(integrate(spans_s[0]) - integrate(spans_s[1])) / np.diff(edges_s)
    return np.clip(covered, 0.0, None)


def _bin_spans(lane: TimelineLane, first: int, last: int, window: TimelineWindow) -> list[float]:
    """Long spans as they are; of the short ones in a bin the longest one's job, and how much of the
    bin all of them cover.
    """
    bins, bin_s = max(window.width // _BIN_PIXELS, 1), window.bin_s
    starts_s, ends_s = np.array(lane.starts_s[first:last]), np.array(lane.ends_s[first:last])
    jobs, kinds = np.array(lane.jobs[first:last]), np.array(lane.kinds[first:last])
    length_s = ends_s - starts_s
    is_long = (length_s > bin_s) | (kinds == FAULT)
    long = np.flatnonzero(is_long & (ends_s >= window.start_s))
    columns = (starts_s[long], ends_s[long], jobs[long], kinds[long])
    entries = _entries(*columns, np.full(len(long), 100))
    middle_s = (starts_s + ends_s) / 2 - window.start_s
    at = np.floor(middle_s / bin_s).astype(np.int64)
    short = np.flatnonzero(~is_long & (at >= 0) & (at < bins))
    covered_s = np.bincount(at[short], weights=length_s[short], minlength=bins)
    order = short[np.lexsort((length_s[short], at[short]))]
    chosen = order[np.flatnonzero(np.diff(at[order], append=-1))]  # the longest of each bin
    begin_s = window.start_s + at[chosen] * bin_s
    shares = np.minimum(np.round(100 * covered_s[at[chosen]] / bin_s), 100).astype(np.int64)
    return entries + _entries(begin_s, begin_s + bin_s, jobs[chosen], kinds[chosen], shares)


def _plain(lane: TimelineLane, first: int, last: int, start_s: float) -> list[float]:
    """Spans as they are, without those that ended before the window."""
    ends_s = np.array(lane.ends_s[first:last])
    seen = np.flatnonzero(ends_s >= start_s)
    columns = (np.array(lane.jobs[first:last])[seen], np.array(lane.kinds[first:last])[seen])
    starts_s = np.array(lane.starts_s[first:last])[seen]
    return _entries(starts_s, ends_s[seen], *columns, np.full(len(seen), 100))


def _entries(*columns: NDArray[Any]) -> list[float]:
    """Five columns as one list; times in whole milliseconds, the rest in whole numbers."""
    found: list[float] = [0.0] * (5 * len(columns[0]))
    for place, column in enumerate(columns):
        found[place::5] = np.round(column, 3).tolist()
    return found


def _without(entries: list[float], hidden: set[int]) -> list[float]:
    if not hidden:
        return entries
    starts = [at for at in range(0, len(entries), 5) if int(entries[at + 2]) not in hidden]
    return [value for at in starts for value in entries[at : at + 5]]
