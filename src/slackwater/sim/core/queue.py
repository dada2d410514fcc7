"""The event queue: virtual time, ties broken by order of entry."""

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from slackwater.control.driver import Driver

T = TypeVar("T")


class EventQueue(Generic[T]):
    """Items in order of time, then of entry."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, T]] = []
        self._entered = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, at_s: float, item: T) -> None:
        """Schedule `item` at `at_s`, which must not be in the past."""
        assert at_s >= self.now_s, f"event at {at_s} pushed when it is {self.now_s}"
        heapq.heappush(self._heap, (at_s, self._entered, item))
        self._entered += 1

    def push_soon(self, at_s: float, item: T) -> None:
        """Schedule `item` at `at_s`, or now if that is past."""
        self.push(max(at_s, self.now_s), item)

    def peek_s(self) -> float:
        """The time of the next item."""
        return self._heap[0][0]

    def pop(self) -> T:
        """Advance time to the next item and remove it."""
        self.now_s, _, item = heapq.heappop(self._heap)
        return item


@contextmanager
def name_failing_event(driver: Driver[Any, Any], queue: EventQueue[Any]) -> Iterator[None]:
    """Turn any exception into an AssertionError that names the current event."""
    try:
        yield
    except Exception as error:
        at = f"event {driver.events}, {type(driver.current).__name__}, {queue.now_s:.1f} s"
        raise AssertionError(f"{error or type(error).__name__} ({at})") from error
