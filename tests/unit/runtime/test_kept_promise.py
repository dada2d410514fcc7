"""How a service's promise is counted for its users."""

import pytest

from slackwater.model.ids import TurnId
from slackwater.model.serving import ServingSlo
from slackwater.runtime.services.slo_tracker import SloTracker

ONE, TWO = TurnId("one"), TurnId("two")


@pytest.fixture
def promise() -> SloTracker:
    return SloTracker("chat", ServingSlo(ttft_s=0.5, tpot_s=0.1), since_s=100.0)


def attainment(promise: SloTracker, now_s: float) -> tuple[float, float]:
    gauges = promise.gauges(now_s)
    return gauges["serving_requests_last_minute"], gauges["serving_slo_attainment_last_minute"]


def test_time_to_the_first_token_is_counted_from_the_requests_arrival(promise: SloTracker) -> None:
    promise.record_arrival(ONE, 100.0)
    promise.record_first_token(ONE, 100.4)
    promise.record_first_token(ONE, 100.45)
    promise.record_answer(ONE, 100.9, tokens=11)
    assert attainment(promise, 101.0) == (1, 1.0)
    gauges = promise.gauges(101.0)
    assert gauges["serving_ttft_p99_last_minute_s"] == pytest.approx(0.4)
    assert gauges["serving_tpot_p99_last_minute_s"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("first_s", "end_s"), [(100.6, 100.7), (100.4, 102.4)], ids=["first token", "pace"]
)
def test_a_late_first_token_or_a_slow_pace_breaks_the_promise(
    promise: SloTracker, first_s: float, end_s: float
) -> None:
    promise.record_arrival(ONE, 100.0)
    promise.record_first_token(ONE, first_s)
    promise.record_answer(ONE, end_s, tokens=11)
    assert attainment(promise, 103.0) == (1, 0.0)


def test_a_failed_request_breaks_the_promise_and_has_no_times(promise: SloTracker) -> None:
    promise.record_arrival(ONE, 100.0)
    promise.record_failure(ONE, 100.1)
    assert attainment(promise, 101.0) == (1, 0.0)
    assert promise.gauges(101.0)["serving_ttft_p99_last_minute_s"] == 0.0


def test_a_request_that_its_user_gives_up_counts_if_it_was_late_by_then(
    promise: SloTracker,
) -> None:
    promise.record_arrival(ONE, 100.0)
    promise.record_cancel(ONE, 100.2)
    assert attainment(promise, 101.0) == (0, 1.0)
    promise.record_arrival(TWO, 101.0)
    promise.record_cancel(TWO, 101.8)
    assert attainment(promise, 102.0) == (1, 0.0)


def test_turns_of_nobody_who_waits_are_not_counted(promise: SloTracker) -> None:
    promise.record_first_token(ONE, 100.0)
    promise.record_answer(ONE, 100.0, tokens=3)
    promise.record_failure(TWO, 100.0)
    assert attainment(promise, 101.0) == (0, 1.0)
    assert promise.minutes() == []


def test_the_last_minute_forgets_and_the_minutes_remember(promise: SloTracker) -> None:
    for at_s, took_s in ((100.0, 0.1), (130.0, 0.9), (170.0, 0.2)):
        promise.record_arrival(ONE, at_s)
        promise.record_answer(ONE, at_s + took_s, tokens=1)
    assert attainment(promise, 195.0) == (1, 1.0)
    first, second = promise.minutes()
    assert (first["minute"], first["requests"], first["attainment"]) == (0, 2, 0.5)
    assert (second["minute"], second["requests"], second["attainment"]) == (1, 1, 1.0)


def test_requests_that_still_wait_count_for_whether_the_promise_is_kept(
    promise: SloTracker,
) -> None:
    for turn in (ONE, TWO):
        promise.record_arrival(turn, 100.0)
    assert promise.is_met(100.4)
    assert not promise.is_met(100.6), "two wait for longer than promised"
    for turn in (ONE, TWO):
        promise.record_first_token(turn, 100.7)
        promise.record_answer(turn, 100.9, tokens=3)
    assert not promise.is_met(101.0), "both were late"
    assert promise.is_met(140.0)
