"""The event queue: virtual time, ties broken by order of entry."""

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from slackwater.control.driver import Driver

T = TypeVar("T")


class EventQueue(Generic[T]):
    """Things to happen, taken out in order of time; equal times in the order they were put in."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, T]] = []
        self._entered = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, at_s: float, item: T) -> None:
        """Let `item` happen at `at_s`, which must not lie in the past."""
        assert at_s >= self.now_s, f"event at {at_s} pushed when it is {self.now_s}"
        heapq.heappush(self._heap, (at_s, self._entered, item))
        self._entered += 1

    def push_soon(self, at_s: float, item: T) -> None:
        """The same, at once if the time is past."""
        self.push(max(at_s, self.now_s), item)

    def peek_s(self) -> float:
        """When the next thing happens."""
        return self._heap[0][0]

    def pop(self) -> T:
        """Move time to the next thing and take it out."""
        self.now_s, _, item = heapq.heappop(self._heap)
        return item


@contextmanager
def explained(driver: Driver[Any, Any], queue: EventQueue[Any]) -> Iterator[None]:
    """What is raised meanwhile says at which event: a controller that raises broke its word too."""
    try:
        yield
    except Exception as error:
        at = f"event {driver.events}, {type(driver.current).__name__}, {queue.now_s:.1f} s"
        raise AssertionError(f"{error or type(error).__name__} ({at})") from error
