"""Percentiles of times counted by size, and turn lengths that engines and clients agree on."""

import json
from pathlib import Path

import pytest

from benchmarks.rollout.paced_engines import length_of, token_at
from benchmarks.service.times import Times, read_times


def counted(*seconds: float) -> Times:
    times = Times()
    for each in seconds:
        times.add(each)
    return times


@pytest.mark.parametrize(("share", "expected_s"), [(0.5, 0.001), (0.99, 0.001), (1.0, 0.25)])
def test_a_percentile_is_within_two_percent_above(share: float, expected_s: float) -> None:
    found_s = counted(*[0.001] * 99, 0.25).percentile_s(share)
    assert expected_s <= found_s <= 1.03 * expected_s


def test_what_came_before_does_not_count() -> None:
    earlier, later = counted(5.0), counted(5.0, 0.01, 0.01)
    assert later.since(earlier).percentile_s(1.0) < 0.011


def test_times_come_back_from_a_file(tmp_path: Path) -> None:
    file, times = tmp_path / "times.json", counted(0.5, 0.002)
    file.write_text(json.dumps({"lag": times.counts}))
    assert read_times(file)["lag"].counts == times.counts


def test_the_length_of_a_turn_follows_from_its_seed_and_has_bounds() -> None:
    lengths = [length_of(seed, 1400) for seed in range(300)]
    assert lengths == [length_of(seed, 1400) for seed in range(300)]
    assert 200 <= min(lengths) < 300 < 1300 < max(lengths) <= 1400
    assert len({token_at(position) for position in range(7)}) == 7
