"""Windows of the timeline: exact where there is room, binned where there is none."""

from collections.abc import Callable

import pytest

from slackwater.timeline.lanes import (
    FAULT,
    ROLLOUT,
    SYNC,
    TRAIN,
    LaneTimeline,
    TimelineWindow,
)


def entries(found: dict[str, list[float]]) -> list[tuple[float, ...]]:
    spans = found["spans"]
    return [tuple(spans[at : at + 5]) for at in range(0, len(spans), 5)]


def test_a_window_with_room_shows_every_span_as_it_is() -> None:
    timeline = LaneTimeline()
    lane = timeline.lane("train-0", "train nodes")
    lane.rented_s.append((0.0, None))
    timeline.add(lane, "a", TRAIN, 0.0, 2.0)
    timeline.add(lane, "b", TRAIN, 2.5, 4.0)
    timeline.begin(lane, "a", SYNC, 4.0)
    found = timeline.window(TimelineWindow(1.0, 10.0, 1000, 0, 10), 5.0)
    (row,) = found["rows"]
    assert entries(row) == [
        (0.0, 2.0, 0, TRAIN, 100),
        (2.5, 4.0, 1, TRAIN, 100),
        (4.0, 5.0, 0, SYNC, 100),
    ]
    assert row["rents"] == [[0.0, 5.0]]
    assert found["jobs"] == ["a", "b"]


def test_a_span_that_goes_on_is_one_span() -> None:
    timeline = LaneTimeline()
    lane = timeline.lane("engine-0", "engines")
    for now_s in (0.0, 0.25, 0.5):
        timeline.begin(lane, "a", ROLLOUT, now_s)
    timeline.begin(lane, "b", ROLLOUT, 0.75)
    timeline.end(lane, 1.0)
    found = timeline.window(TimelineWindow(0.0, 1.0, 1000, 0, 1), 1.0)["rows"][0]
    assert entries(found) == [(0.0, 0.75, 0, ROLLOUT, 100), (0.75, 1.0, 1, ROLLOUT, 100)]


def test_spans_too_short_to_draw_become_bins_that_keep_the_busy_share() -> None:
    timeline = LaneTimeline()
    lane = timeline.lane("engine-0", "engines")
    for number in range(5000):  # busy for 0.6 of every second
        timeline.add(lane, "ab"[number % 2], ROLLOUT, number, number + 0.6)
    timeline.add(lane, "lost", FAULT, 5000.0, 5000.0)
    found = entries(timeline.window(TimelineWindow(0.0, 5001.0, 200, 0, 1), 5001.0)["rows"][0])
    bins = [entry for entry in found if entry[3] != FAULT]
    assert len(bins) <= 100
    assert sum((end - start) * share / 100 for start, end, _, _, share in bins) == pytest.approx(
        3000.0, rel=0.02
    )
    assert [entry for entry in found if entry[3] == FAULT] == [(5000.0, 5000.0, 2, FAULT, 100)]


def overview_of(
    timeline: LaneTimeline, end_s: float, visible: Callable[[str], bool] | None = None
) -> dict[str, list[float]]:
    made = timeline.overview(end_s, visible)
    for lane in timeline.lanes():
        made.add(lane)
    series: dict[str, list[float]] = made.figures()["series"]
    return series


def test_only_the_lanes_in_view_are_sent() -> None:
    timeline = LaneTimeline()
    for number in range(1000):
        timeline.add(timeline.lane(f"gpu-{number}", "rollout nodes"), "a", ROLLOUT, 0.0, 1.0)
    found = timeline.window(TimelineWindow(0.0, 1.0, 500, 400, 30), 1.0)
    assert len(found["lanes"]) == 1000 and len(found["rows"]) == 30


def test_a_live_lane_forgets_its_oldest_half() -> None:
    timeline = LaneTimeline()
    lane = timeline.lane("engine-0", "engines")
    for number in range(30_000):
        timeline.add(lane, "a", ROLLOUT, number, number + 0.5)
    assert 10_000 <= len(lane.starts_s) <= 20_000
    assert lane.ends_s[-1] == 29_999.5


def test_a_window_that_is_there_already_gets_only_what_changed() -> None:
    timeline = LaneTimeline()
    lane = timeline.lane("engine-0", "engines")
    for number in range(100):
        timeline.add(lane, "a", ROLLOUT, number, number + 0.5)
    whole = timeline.window(TimelineWindow(0.0, 200.0, 1000, 0, 5), 100.0)
    assert len(whole["rows"][0]["spans"]) == 5 * 100 and whole["since_s"] is None
    timeline.begin(lane, "a", TRAIN, 100.0)
    again = TimelineWindow(0.0, 200.0, 1000, 0, 5, since_s=97.3, names=whole["names"])
    found = timeline.window(again, 102.0)
    assert "lanes" not in found and "jobs" not in found
    assert 96.8 <= found["since_s"] <= 97.3  # the edge of a bin
    starts = found["rows"][0]["spans"][::5]
    assert starts == [97.0, 98.0, 99.0, 100.0]
    timeline.lane("engine-1", "engines")
    assert len(timeline.window(again, 102.0)["lanes"]) == 2


def test_a_binned_window_is_extended_without_a_gap() -> None:
    """What a browser makes of the whole and the changes covers as much as the whole later on."""
    timeline = LaneTimeline()
    lane = timeline.lane("engine-0", "engines")
    for number in range(20_000):
        timeline.append(lane, timeline.job_number("a"), ROLLOUT, number / 20, number / 20 + 0.04)
    asked = TimelineWindow(0.0, 2000.0, 1000, 0, 5)
    old = timeline.window(asked, 1000.0)["rows"][0]["spans"]
    for number in range(20_000, 20_400):
        timeline.append(lane, 0, ROLLOUT, number / 20, number / 20 + 0.04)
    more = timeline.window(TimelineWindow(0.0, 2000.0, 1000, 0, 5, since_s=990.0), 1020.0)
    kept = [old[at : at + 5] for at in range(0, len(old), 5) if old[at + 1] <= more["since_s"]]
    new = more["rows"][0]["spans"]
    kept += [new[at : at + 5] for at in range(0, len(new), 5)]
    covered_s = sum((end_s - start_s) * share / 100 for start_s, end_s, _, _, share in kept)
    assert covered_s == pytest.approx(1020 * 0.8, rel=0.01)


def test_the_overview_is_the_share_of_all_lanes_by_phase() -> None:
    timeline = LaneTimeline()
    timeline.add(timeline.lane("a", "x"), "j", ROLLOUT, 0.0, 50.0)
    timeline.add(timeline.lane("b", "x"), "k", TRAIN, 50.0, 100.0)
    series = overview_of(timeline, 100.0)
    assert series["rollout"][10] == pytest.approx(0.5) and series["rollout"][-10] == 0
    assert series["train"][10] == 0 and series["train"][-10] == pytest.approx(0.5)
    mine = overview_of(timeline, 100.0, lambda job: job == "k")
    assert max(mine["rollout"]) == 0


def test_lanes_that_have_been_gone_longest_are_dropped_first() -> None:
    timeline = LaneTimeline()
    for number in range(5):
        ended_s = None if number == 0 else 10.0 - number
        timeline.lane(f"spot-{number}", "spot engines").rented_s.append((0.0, ended_s))
    timeline.forget_gone(3)
    assert [lane.name for lane in timeline.lanes()] == ["spot-0", "spot-1", "spot-2"]
