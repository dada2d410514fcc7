"""Rollouts on serving devices, in virtual time."""

import numpy as np
import pytest

from benchmarks.rollout.simulated.agent_run import AgentFleet
from benchmarks.serving.arrivals import scaled
from benchmarks.serving.simulated.autoscaling import AutoscaledCluster
from benchmarks.serving.simulated.lending_cluster import LendingCluster, LendingPlan
from benchmarks.serving.simulated.run import CoservingResult, CoservingRun, RolloutStages
from benchmarks.serving.simulated.storm import run_storm
from harness.serving_checks import check_service
from slackwater.model.ids import NodeId
from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.modes import find_mode
from slackwater.sim.rollout.agent_trace import draw_games
from slackwater.sim.rollout.engine_cost import H800, QWEN3_8B, EngineCost, SharedDevice
from slackwater.sim.serving.node import ServingNode
from slackwater.sim.serving.service_share import ServedRequest, ServiceShare
from slackwater.sim.serving.serving_trace import Arrival, draw_arrivals

SLO = ServingSlo(0.5, 0.15)
ENGINE = EngineCost(QWEN3_8B, H800, 1)
SECONDS = 20.0
ARRIVALS = draw_arrivals(SECONDS, 1, rate=4.0, burst_requests=6)


def outcome(mode: str, cluster: type[LendingCluster] = LendingCluster) -> CoservingResult:
    plan = LendingPlan(SharedDevice(ENGINE, ENGINE), SLO, 2, find_mode(mode))
    games = [session[:5] for session in draw_games(64, 0)]
    stages = RolloutStages(games, 1)
    return CoservingRun(plan, AgentFleet(ENGINE, 1), stages, ARRIVALS, cluster=cluster).run(SECONDS)


@pytest.fixture(scope="module")
def alone() -> CoservingResult:
    return outcome("none")


@pytest.mark.parametrize("mode", ["prefix", "dual", "ours"])
def test_lent_devices_make_rollouts_shorter(alone: CoservingResult, mode: str) -> None:
    assert outcome(mode).rollout_s < 0.9 * alone.rollout_s


def test_ours_breaks_no_promise_that_was_kept_without_lending(alone: CoservingResult) -> None:
    lent = outcome("ours")
    assert min(len(lent.ttft_s), len(alone.ttft_s)) >= len(ARRIVALS)
    assert lent.beside(alone, SLO)[0] == 0


def test_a_service_that_is_overloaded_lends_nothing_and_loses_nothing_by_offering_it() -> None:
    """Bursts that two devices cannot answer in time: the first may find a rollout's step on the
    device.
    """
    seconds = 60.0
    arrivals = draw_arrivals(seconds, 3, rate=2.0, burst_every_s=6.0, burst_requests=30)
    plans = {
        mode: LendingPlan(SharedDevice(ENGINE, ENGINE), SLO, 2, find_mode(mode))
        for mode in ("none", "ours", "dual", "prefix")
    }
    stages = RolloutStages([session[:5] for session in draw_games(64, 0)], 1)
    found = {
        mode: CoservingRun(plan, AgentFleet(ENGINE, 1), stages, arrivals).run(seconds)
        for mode, plan in plans.items()
    }
    both = min(len(result.ttft_s) for result in found.values())
    kept = {mode: float(result.met(SLO)[:both].mean()) for mode, result in found.items()}
    assert 0.2 < kept["none"] < 0.9
    assert kept["ours"] >= kept["none"] - 0.01
    assert kept["dual"] >= kept["none"] - 0.01
    assert kept["prefix"] < kept["ours"]
    assert found["ours"].rollout_share < 0.3 * found["prefix"].rollout_share


def test_the_service_has_the_memory_of_the_rollouts_weights_while_nothing_is_lent() -> None:
    node = ServingNode(
        NodeId("n"),
        SharedDevice(ENGINE, ENGINE),
        SLO,
        find_mode("ours"),
        lambda at_s, happen: None,
        seed=0,
    )
    alone = node.service.limit_tokens
    assert node.make_room()
    weights = ENGINE.weight_bytes / ENGINE.model.kv_bytes_per_token
    assert node.service.limit_tokens == pytest.approx(alone - weights, abs=2)
    node.take_back()
    assert node.service.limit_tokens == alone


def test_nodes_that_change_sides_whole_serve_and_roll_out_too() -> None:
    scaled_out = outcome("prefix", AutoscaledCluster)
    assert scaled_out.rollout_share > 0
    assert not np.isnan(scaled_out.ttft_s).any()


def test_the_same_seed_gives_the_same_run() -> None:
    first, again = outcome("ours"), outcome("ours")
    assert np.array_equal(first.ttft_s, again.ttft_s)
    assert first.stages_s == again.stages_s


def test_a_denser_trace_has_that_many_times_the_requests_at_the_same_mean_length() -> None:
    trace = [Arrival(float(t), 100, 10) for t in range(100)]
    assert len(scaled(trace, 3.0, 100.0, 0)) == 300
    assert 220 < len(scaled(trace, 2.5, 100.0, 0)) < 280
    assert all(0 <= arrival.at_s < 100.0 for arrival in scaled(trace, 2.5, 100.0, 0))


@pytest.mark.parametrize("seed", range(6))
def test_a_storm_leaves_nothing_unanswered_and_no_memory_promised_twice(seed: int) -> None:
    mode = ("ours", "dual", "preempt", "static", "ours", "prefix")[seed]
    storm = run_storm(seed, seconds=12.0, mode=mode)
    assert storm.faults > 0
    assert storm.requests > 0
    assert storm.unanswered == 0
    assert len(storm.result.stages_s) == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_service_whose_prompts_run_alone_now_and_then_answers_each_request_whole(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    share = ServiceShare(64, 0.15, int(rng.integers(200, 2000)))
    requests = [
        ServedRequest(number, 0.0, int(rng.integers(1, 150)), int(rng.integers(1, 40)))
        for number in range(20)
    ]
    waiting, now_s = requests[::-1], 0.0
    done: list[ServedRequest] = []
    while len(done) < len(requests):
        if waiting and rng.random() < 0.3:
            share.add(waiting.pop())
        context = share.state().context
        work = share.begin_step(decode=bool(rng.random() < 0.5))
        alone = work.pairs == 0.0 and context > 0
        now_s += 0.01
        first, ended = share.end_step(now_s)
        assert not (alone and ended), "one decoded in a step of prompts"
        done += ended + [one for one in first if not share.decode(one, now_s)]
        check_service(share)
    assert all(one.done_s >= one.first_token_s for one in requests)
