"""Real engine processes, killed while they generate: no token is lost, doubled or changed."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.options import BenchOptions
from benchmarks.rollout.kills import Faults, disturbed_and_not
from harness.live_fleet import FleetPlan
from harness.multi_turn import MultiTurn
from slackwater.zoo.tiny import make_model


@pytest.mark.process
@pytest.mark.timeout(900)
def test_a_disturbed_run_gives_the_tokens_of_an_undisturbed_one(tmp_path: Path) -> None:
    make_model("small", tmp_path / "model")
    plan = FleetPlan(tmp_path / "model", tmp_path, max_running=16)
    workload = MultiTurn(seed=3, trajectories=12, turns=3, max_tokens=80)
    faults = Faults(kills=4, notices=1, seed=3)
    figures = asyncio.run(disturbed_and_not(plan, workload, faults, BenchOptions()))
    assert figures["kills"] == 4
    assert figures["notices"] == 1
    assert figures["turns_that_moved"] >= 4
    assert figures["different_turns"] == figures["different_logprobs"] == 0
    assert figures["lost_tokens"] == figures["duplicated_tokens"] == 0
    assert figures["replayed_events"] > 100
    assert figures["replay_divergences"] == 0
