"""Rules against each other, in small: the same manager under each."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rollout.simulated.agent_run import (
    AgentFleet,
    AgentResult,
    EndedTrajectory,
    run_agents,
)
from benchmarks.rollout.simulated.response_lengths import log_normal
from benchmarks.rollout.simulated.rules import AGENT_RULES, SPOT_RULES
from benchmarks.rollout.simulated.sessions import drawn_sessions
from benchmarks.rollout.simulated.split_run import SplitPlan, run_split
from benchmarks.rollout.simulated.spot_run import SETUPS, SpotResult, SpotSetup, run_spot
from benchmarks.rollout.simulated.trainer import TrainingStepPlan
from benchmarks.rollout.split import step_figures
from benchmarks.rollout.spot_places import ReturningInstances, window_of
from slackwater.model.spot_trace import SpotEvent
from slackwater.policy.rollout.seeding import AdaptiveWindow, ColocatedSeeding
from slackwater.runtime.settings import ServiceSettings
from slackwater.sim.rollout.engine_cost import H800, QWEN3_8B, EngineCost
from slackwater.sim.rollout.extra_capacity import SpotRates

LENGTHS = log_normal(1200.0, 0.7, 4096.0)
PLAN = TrainingStepPlan(turns=192, max_tokens=4096, min_batch=8)


# A first window in proportion to these short steps.
SHORT = {"rlboost": replace(SPOT_RULES["rlboost"], seeding=AdaptiveWindow(initial_s=20.0))}


def run(rule: str, trace: tuple[SpotEvent, ...], seconds: float = 300.0) -> SpotResult:
    shape, nodes = SETUPS["14b"]
    setup = SpotSetup(shape, nodes, LENGTHS, PLAN)
    return run_spot(setup, (SPOT_RULES | SHORT)[rule], trace, seconds=seconds)


STEADY = tuple(SpotEvent(0.0, "add", f"s{number}") for number in range(4))


def test_every_response_is_trained_on_exactly_once_whatever_is_preempted() -> None:
    stormy = SpotRates(4.0, removals_per_h=20.0, hours=0.2).draw(3)
    lengths = SpotSetup(*SETUPS["14b"], LENGTHS, PLAN).draw_lengths(0)
    for rule in ("rlboost_seeding_off", "rlboost", "ours"):
        result = run(rule, stormy, 200.0)
        for number, step in enumerate(result.steps):
            assert step.tokens == sum(lengths(number)), f"{rule}, step {number}"


def test_spot_instances_make_steps_shorter_and_seeding_bridges_their_absence() -> None:
    colocated = run("colocated", STEADY)
    assert colocated.mean_remote == 0
    for rule in ("rlboost", "ours"):
        assert run(rule, STEADY).tokens_per_s > 1.05 * colocated.tokens_per_s
        alone = run(rule, ())
        assert alone.tokens_per_s == pytest.approx(colocated.tokens_per_s, rel=0.05)


def test_seeding_and_what_is_remembered_help_when_instances_vanish_and_return() -> None:
    few = ReturningInstances(settle_s=150.0, return_every_s=150.0, most=2)
    for rule in ("rlboost", "ours"):
        rates = {
            off: run(f"{rule}{off}", few.trace(), few.end_s).tokens_per_s_since(few.lost_s)
            for off in ("", "_seeding_off", "_memory_off")
        }
        assert rates["_seeding_off"] < 0.95 * rates[""], rule
        assert rates["_memory_off"] < rates[""], rule


def test_ours_is_what_a_live_service_runs_with() -> None:
    live = ServiceSettings(state=Path(), models={"tiny": Path("tiny")}).rollout_settings
    for rules in (SPOT_RULES["ours"], AGENT_RULES["ours"]):
        assert (rules.routing, rules.balancing) == (live.routing, live.balancing)
        assert rules.seeding == live.seeding


def test_a_window_of_a_trace_begins_with_those_who_are_there() -> None:
    whole = (
        SpotEvent(0.0, "add", "a"),
        SpotEvent(5.0, "add", "b"),
        SpotEvent(8.0, "remove", "a"),
        SpotEvent(12.0, "remove", "b"),
        SpotEvent(20.0, "add", "c"),
    )
    assert window_of(whole, 10.0, 10.0) == (
        SpotEvent(0.0, "add", "b"),
        SpotEvent(2.0, "remove", "b"),
    )


def test_a_run_is_the_same_twice() -> None:
    assert run("ours", STEADY) == run("ours", STEADY)


def test_warm_caches_beat_affinity_when_contexts_do_not_all_fit() -> None:
    sessions = drawn_sessions(96, 1, max_context_tokens=32_768)
    fleet = AgentFleet(EngineCost(QWEN3_8B, H800, 1), 2)
    seconds = {
        rule: run_agents(fleet, AGENT_RULES[rule], sessions).seconds
        for rule in ("pinned", "turn_wise", "affinity", "ours")
    }
    assert seconds["ours"] < min(seconds[rule] for rule in ("pinned", "turn_wise", "affinity"))


@pytest.mark.parametrize(("early", "late", "gained"), [(412_000, 10, True), (10, 412_000, False)])
def test_idle_devices_train_only_what_has_ended(early: int, late: int, gained: bool) -> None:
    ended = (EndedTrajectory(0, 100.0, early), EndedTrajectory(1, 300.0, late))
    result = AgentResult(300.0, 2, 0, 0, 0, ended)
    figures = step_figures(AgentFleet(EngineCost(QWEN3_8B, H800, 1), 8), result)
    train_s = 412_010 / (8 * 989e12 * 0.4 / (2e9 * 8.2 * 6))
    assert figures["step_s"] == pytest.approx(300.0 + 16 * 8.2e9 / 8 / 55.3e9 + train_s + 4.0)
    most = (300.0 + train_s + 4.0) / 304.0 if gained else 1.0
    assert figures["at_most"] == pytest.approx(most, rel=1e-4)
    assert figures["switched"] == pytest.approx(most, rel=0.01)


def test_half_the_devices_train_while_the_others_finish_the_rollout() -> None:
    """All tokens are trained whatever the order, and none before its trajectory has ended."""
    sessions = drawn_sessions(48, 1, max_context_tokens=32_768)
    fleet = AgentFleet(EngineCost(QWEN3_8B, H800, 1), 4)
    window = replace(AGENT_RULES["ours"], seeding=AdaptiveWindow(), trainer_patience_s=1e6)
    (after,) = run_split(
        fleet, replace(window, seeding=ColocatedSeeding()), [sessions], SplitPlan(2)
    )
    for in_order in (False, True):
        plan = SplitPlan(2, overlap=8, in_order=in_order)
        (split,) = run_split(fleet, window, [sessions], plan)
        assert after.switches == split.switches == 1
        assert in_order or split.step_s < after.step_s
        assert split.step_s >= max(split.rollout_s, after.step_s - after.rollout_s)
