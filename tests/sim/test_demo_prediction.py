"""The demo of five kinds of slack in virtual time, and its figures beside the live ones."""

from typing import Any

import pytest

from benchmarks.slacks.demo_fleet import DemoFleet, DemoRunReport
from benchmarks.slacks.live import compared

ITERATIONS = 8


def printed(**more: Any) -> dict[str, Any]:
    """What the demo prints, of two jobs with rollouts of 2 s and training of 1 s."""
    profile = {"rollout_s": 2.0, "train_s": 1.0, "sync_s": 0.0}
    job = {"iterations": ITERATIONS, "trained": ITERATIONS, "bound": 4.0, "profile": profile}
    return {
        "jobs": [{**job, "job": name} for name in ("one", "other")],
        "instance": {"started_s": 3.0, "lived_s": 5.0},
        "took_s": 28.0,
        "tokens": {"dedicated": 900, "borrowed": 100},
        "served": {"attainment": 0.9, "attainment_alone": 1.0},
        **more,
    }


def test_two_jobs_take_turns_on_the_rollout_node_and_a_spot_engine_comes_and_goes() -> None:
    found = DemoFleet(printed()).finish()
    rollouts_s = 2 * (ITERATIONS - 1) * 2.0
    assert rollouts_s - 2.0 <= found.completed_s <= rollouts_s + 4.0
    assert 0.0 < found.spot_s < found.completed_s
    assert sum(found.tokens.values()) > 0


def test_iterations_that_train_nothing_take_no_time_to_train() -> None:
    rows = [{**row, "profile": {**row["profile"], "train_s": 6.0}} for row in printed()["jobs"]]
    idle = [{**row, "trained": 0} for row in rows]
    trained_s = DemoFleet(printed(jobs=rows)).finish().completed_s
    assert DemoFleet(printed(jobs=idle)).finish().completed_s < trained_s - ITERATIONS * 6.0


def test_every_measure_counts_for_the_least_and_the_most() -> None:
    tokens = {"dedicated": 900, "borrowed": 100, "local": 0}
    found = compared(printed(tokens=tokens), DemoRunReport(21.0, 5.0, {"dedicated": 3, "spot": 1}))
    assert found["completed_s_predicted_over_live"] == pytest.approx(0.75)
    assert found["attainment_predicted_over_live"] == pytest.approx(1 / 0.9)
    assert found["dedicated_tokens_predicted_over_live"] == pytest.approx(750 / 900)
    assert found["predicted_over_live_min"] == 0.0  # borrowed tokens that nobody foresaw
    assert 1e6 < found["predicted_over_live_max"] < float("inf")  # nobody sampled on spot
    assert found["local_tokens_predicted_over_live"] == 1.0
