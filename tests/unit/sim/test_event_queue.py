"""Virtual time goes forward, and ties keep their order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.sim.core.queue import EventQueue


@given(st.lists(st.integers(0, 5), max_size=40))
def test_things_come_out_by_time_and_then_by_order_of_entry(times: list[int]) -> None:
    queue: EventQueue[int] = EventQueue()
    for entry, at_s in enumerate(times):
        queue.push(float(at_s), entry)
    taken = [
        (queue.now_s, item) for item in iter(lambda: queue.pop() if len(queue) else None, None)
    ]
    order = sorted(range(len(times)), key=lambda entry: (times[entry], entry))
    assert [item for _, item in taken] == order


def test_nothing_can_be_put_into_the_past() -> None:
    queue: EventQueue[str] = EventQueue()
    queue.push(2.0, "later")
    queue.pop()
    with pytest.raises(AssertionError, match="pushed when it is"):
        queue.push(1.0, "earlier")
