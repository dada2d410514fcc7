"""Figures of co-serving windows."""

import math

from benchmarks.serving.coserving_windows import Played, pooled


def played(rollout_tokens: int, needed_s: float = 0.0) -> Played:
    return Played(
        times=[],
        seconds=10.0,
        serving_s=10.0,
        needed_s=needed_s,
        rollout_tokens=rollout_tokens,
        given_back=0,
        cuts=0,
        stopped_s=0.0,
    )


def test_a_window_without_a_request_has_figures_too() -> None:
    figures = pooled([played(100)], [played(0)], alone=20.0)
    assert all(math.isfinite(value) for value in figures.values())
    assert (figures["requests"], figures["attainment"]) == (0.0, 1.0)
    assert (figures["attainment_lost_points"], figures["ttft_p99_ms"]) == (0.0, 0.0)
    assert figures["harvest"] == 0.5


def test_the_harvest_counts_the_time_that_the_promise_leaves_free_not_idle_time() -> None:
    busy_all_the_time = played(0, needed_s=5.0)
    assert pooled([played(50)], [busy_all_the_time], alone=20.0)["harvest"] == 0.5
