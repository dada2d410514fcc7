"""Bytes over links, as fluids: flows share every link fairly, and one that follows another cannot
overtake it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_EPSILON = 1e-2  # bytes, and bytes per second: below what doubles tell apart in what travels
_ALIKE = 1e-9


@dataclass(slots=True)
class Flow:
    """`size` bytes over `links`; `after` is the flow that fills its source, if that is not full
    yet.
    """

    size: float
    links: tuple[str, ...]
    after: "Flow | None" = None
    done: float = 0.0
    rate: float = 0.0

    @property
    def over(self) -> bool:
        return self.done >= self.size - _EPSILON


class Links:
    """Capacities in bytes per second, by name."""

    def __init__(self, capacity: Mapping[str, float]) -> None:
        self._capacity = dict(capacity)
        self.carried: dict[str, float] = dict.fromkeys(capacity, 0.0)
        self.flows: list[Flow] = []

    def next_s(self) -> float | None:
        """How long until a flow is over or catches up with the one before it; None if nothing
        flows.
        """
        self._share()
        times = [(f.size - f.done) / f.rate for f in self.flows if f.rate > 0]
        for flow in self.flows:
            before = flow.after
            if before is not None and not before.over and flow.rate > before.rate:
                gap = before.done - flow.done
                if gap > _EPSILON:
                    times.append(gap / (flow.rate - before.rate))
        return min(times, default=None)

    def advance(self, seconds: float) -> list[Flow]:
        """Let time pass, at most `next_s()`; the flows that are over."""
        for flow in self.flows:
            moved = flow.rate * seconds
            flow.done += moved
            for link in flow.links:
                self.carried[link] += moved
        ended = [flow for flow in self.flows if flow.over]
        self.flows = [flow for flow in self.flows if not flow.over]
        return ended

    def _share(self) -> None:
        """Max-min fair rates; then whoever has caught up goes at the speed of the one before it."""
        limits: dict[int, float] = {}
        while True:
            self._fill(limits)
            slower = {
                id(flow): flow.after.rate
                for flow in self._followers()
                if flow.after is not None and flow.rate > flow.after.rate + _EPSILON
            }
            if not slower:
                return
            limits |= slower

    def _followers(self) -> Iterable[Flow]:
        for flow in self.flows:
            before = flow.after
            if before is not None and not before.over and flow.done >= before.done - _EPSILON:
                yield flow

    def _fill(self, limits: Mapping[int, float]) -> None:
        left = dict(self._capacity)
        waiting = list(self.flows)
        for flow in waiting:
            flow.rate = 0.0
        while waiting:
            users: dict[str, int] = {}
            for flow in waiting:
                for link in flow.links:
                    users[link] = users.get(link, 0) + 1
            share = min(left[link] / count for link, count in users.items())
            bound = [flow for flow in waiting if limits.get(id(flow), share + 1) <= share]
            if bound:
                settled = [(flow, limits[id(flow)]) for flow in bound]
            else:
                tight = {k for k, n in users.items() if left[k] / n <= share * (1 + _ALIKE)}
                settled = [(flow, share) for flow in waiting if tight & set(flow.links)]
            for flow, rate in settled:
                flow.rate = rate
                waiting.remove(flow)
                for link in flow.links:
                    left[link] = max(left[link] - rate, 0.0)
