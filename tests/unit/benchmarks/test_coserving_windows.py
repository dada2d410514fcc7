"""Figures of co-serving windows."""

import math

from benchmarks.serving.coserving_windows import Played, pooled


def played(rollout_tokens: int) -> Played:
    return Played(
        times=[],
        seconds=10.0,
        serving_s=0.0,
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
