"""How long training nodes roll out themselves."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fleet_driver import FleetDriver, dispatches, none_of, only
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.rollout.commands import (
    EndSeeding,
    LimitInstances,
    ReleaseInstance,
    ResumeSeeding,
)
from slackwater.control.rollout.events import (
    InstanceLost,
    StepBegan,
    StepDropped,
    StepEnded,
    TrainerWaits,
    TrainerWanted,
)
from slackwater.control.rollout.seeding import SEEDING
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import InstanceId, JobId
from slackwater.model.instance import InstanceKind
from slackwater.policy.rollout.balanced_finish import BalancedFinish
from slackwater.policy.rollout.forecast import Forecast, RemainingTurns
from slackwater.policy.rollout.seeding import (
    AdaptiveWindow,
    SeedingState,
    SeedingView,
    StepTimes,
)
from slackwater.policy.rollout.step_time import StepTime

JOB, OTHER = JobId("job"), JobId("other")


def times(**changed: Any) -> StepTimes:
    fields: dict[str, Any] = {
        "train_s": 100.0,
        "trainer_wait_s": 0.0,
        "remote_wait_s": 0.0,
        "remote_s": 100.0,
        "seeded_s": 0.0,
        "trained_tokens": 1000,
        "mean_remote": 4.0,
        "remote_now": 4,
        "local_engines": 4,
        "steady": True,
        "step_s": 120.0,
    }
    return StepTimes(**(fields | changed))


@given(wait=st.floats(0, 1e4), remote_wait=st.floats(0, 1e4), window=st.floats(0, 1e3))
def test_the_window_moves_by_half_the_difference_of_the_waits_and_never_below_zero(
    wait: float, remote_wait: float, window: float
) -> None:
    policy = AdaptiveWindow(eta=2.0)
    after = policy.learn_from_step(
        SeedingState(window), times(trainer_wait_s=wait, remote_wait_s=remote_wait)
    )
    assert after.window_s == pytest.approx(max(0.0, window + (wait - remote_wait) / 2))


def test_the_window_that_suited_a_number_of_instances_is_remembered_when_it_returns() -> None:
    policy = AdaptiveWindow(eta=2.0)
    state = policy.learn_from_step(SeedingState(10.0), times(trainer_wait_s=40.0, remote_now=4))
    assert state.memory == {4: 30.0}
    state = policy.learn_from_step(state, times(trainer_wait_s=100.0, remote_now=2, steady=False))
    assert state.memory == {4: 30.0}
    assert policy.window_s(state, 4) == 30.0
    forgetful = AdaptiveWindow(remembers=False)
    assert forgetful.window_s(state, 4) == state.window_s


def test_no_more_instances_are_worth_having_than_make_rollout_as_short_as_training() -> None:
    after = AdaptiveWindow().learn_from_step(
        SeedingState(50.0), times(remote_s=150.0, mean_remote=4.0, train_s=100.0)
    )
    assert after.most_remote == 8  # (150 * 4 + 50 * 4) / 100


def forecast() -> Forecast:
    return Forecast(StepTime(0.01, 0.0, 0.0), 10**9, train_tokens_per_s=1000.0)


def view(left: list[float], **changed: Any) -> SeedingView:
    fields: dict[str, Any] = {
        "elapsed_s": 10.0,
        "window_s": 0.0,
        "remote_ready": 2,
        "remote_joined": 2,
        "local_engines": 2,
        "turns": 2 * len(left),
        "turns_left": len(left),
        "ready_tokens": 0.0,
        "remaining": RemainingTurns(np.array(left), np.zeros(len(left))),
        "forecast": forecast(),
    }
    return SeedingView(**(fields | changed))


def test_finish_times_are_those_of_a_batch_that_shrinks_as_its_turns_end() -> None:
    model = Forecast(StepTime(0.0, 0.001, 0.0), 10**9, 1.0)
    turns = RemainingTurns(np.array([10.0, 30.0]), np.zeros(2))
    ends_s, tokens = model.finish_times_s(turns, 1)
    assert ends_s == pytest.approx([10 * 0.002, 10 * 0.002 + 20 * 0.001])
    assert list(tokens) == [10.0, 30.0]


@settings(max_examples=40)
@given(
    left=st.lists(st.floats(1, 5000), min_size=1, max_size=40),
    instances=st.integers(1, 8),
    ready=st.floats(0, 1e6),
)
def test_a_step_ends_no_sooner_than_its_training_and_its_last_response(
    left: list[float], instances: int, ready: float
) -> None:
    turns = RemainingTurns(np.array(left), np.zeros(len(left)))
    model = Forecast(StepTime(0.01, 1e-4, 0.0), 10**9, 1000.0)
    end_s = model.step_end_s(turns, instances, ready, 4.0)
    ends_s, tokens = model.finish_times_s(turns, instances)
    assert end_s >= 4.0 + (ready + tokens.sum()) / 1000.0 - 1e-6
    assert end_s >= ends_s[-1] + tokens[-1] / 1000.0 - 1e-6
    more_s = model.step_end_s(turns, instances + 1, ready, 4.0)
    assert more_s <= end_s + 1e-6


def test_seeding_ends_when_the_trainer_is_what_the_step_waits_for() -> None:
    policy = BalancedFinish()
    training_bound = view([100.0] * 10, ready_tokens=1e6)
    assert policy.stop_reason(policy.start(), training_bound) is not None


def test_seeding_goes_on_while_local_engines_bring_the_end_nearer() -> None:
    policy = BalancedFinish()
    slow = Forecast(StepTime(0.0, 0.01, 0.0), 10**9, train_tokens_per_s=1e9)
    assert policy.stop_reason(policy.start(), view([5000.0] * 50, forecast=slow)) is None


def test_with_no_remote_instance_local_engines_never_stop_before_the_work_is_done() -> None:
    for policy in (BalancedFinish(), AdaptiveWindow(initial_s=0.0)):
        alone = view([100.0], remote_ready=0, remote_joined=0, elapsed_s=1e6)
        assert policy.stop_reason(policy.start(), alone) is None
        assert policy.stop_reason(policy.start(), view([], turns_left=0)) is not None
        assert policy.resume_reason(policy.start(), alone) is not None


def test_the_window_ends_on_time_whether_instances_have_their_weights_or_not() -> None:
    policy = AdaptiveWindow()
    pulling = view([100.0], remote_ready=0, remote_joined=2, window_s=30.0)
    assert policy.stop_reason(policy.start(), replace(pulling, elapsed_s=29.0)) is None
    assert policy.stop_reason(policy.start(), replace(pulling, elapsed_s=30.0)) is not None


def test_without_seeding_the_trainer_takes_its_devices_as_soon_as_anyone_else_is_there() -> None:
    for policy in (BalancedFinish(seeds=False), AdaptiveWindow(seeds=False)):
        begun = view([5000.0] * 50, elapsed_s=0.0, remote_ready=0, remote_joined=1)
        assert policy.stop_reason(policy.start(), begun) is not None
        assert policy.stop_reason(policy.start(), replace(begun, remote_joined=0)) is None
        assert policy.resume_reason(policy.start(), begun) is None


def test_a_rule_that_remembers_nothing_begins_every_step_as_the_first() -> None:
    taught = times(trained_tokens=5000, trainer_wait_s=30.0)
    keeps, forgets = BalancedFinish(), BalancedFinish(remembers=False)
    assert keeps.learn_from_step(keeps.start(), taught).train_tokens_per_s == 50.0
    after = forgets.learn_from_step(forgets.start(), taught)
    assert replace(after, most_remote=None) == forgets.start()


def step(driver: FleetDriver, *, locals_: int = 1, turns: int = 2) -> list[FleetCommand]:
    """A step begins: local engines up, turns submitted."""
    commands = driver.happen(StepBegan(driver.now_s, JOB, 0, turns))
    for number in range(locals_):
        driver.join(f"local{number}", kind=InstanceKind.LOCAL)
    for number in range(turns):
        commands += driver.submit(f"t{number}")
    return commands


def test_when_the_window_ends_local_turns_go_on_remotely_with_their_tokens() -> None:
    driver = FleetDriver(seeding=AdaptiveWindow(initial_s=30.0))
    timer = next(c for c in step(driver) if isinstance(c, SetTimer) and SEEDING in c.name)
    assert timer.at_s == 30.0
    attempt = next(iter(driver.manager.dispatcher.attempts))
    driver.tokens("local0", attempt, [5, 6])
    driver.join("remote")
    driver.now_s = 30.0
    commands = driver.happen(TimerFired(30.0, timer.name))
    assert only(EndSeeding, commands).job == "job"
    assert only(ReleaseInstance, commands).instance == "local0"
    moved = dispatches(commands)
    assert {d.instance for d in moved} == {"remote"}
    assert [5, 6] in [list(d.generated) for d in moved]


def test_seeding_ends_at_once_with_the_last_turn() -> None:
    driver = FleetDriver(seeding=AdaptiveWindow(initial_s=1000.0))
    step(driver, turns=1)
    driver.tokens("local0", 1, [5])
    assert only(EndSeeding, driver.end("local0", 1, 1)).reason == "all turns are done"


def test_a_waiting_trainer_gets_local_engines_again_when_the_last_remote_instance_is_gone() -> None:
    driver = FleetDriver(seeding=AdaptiveWindow(initial_s=0.0))
    driver.join("remote")
    step(driver)
    driver.watch(1.0)
    assert none_of(ResumeSeeding, driver.manager_hears(TrainerWaits(1.0, JOB, 0, 0.0)))
    driver.happen(InstanceLost(2.0, InstanceId("remote"), "preempted"))
    assert only(ResumeSeeding, driver.manager_hears(TrainerWaits(2.0, JOB, 0, 0.0))).job == "job"


def test_the_body_is_told_how_many_instances_are_worth_having() -> None:
    driver = FleetDriver(seeding=AdaptiveWindow(initial_s=0.0))
    driver.join("remote")
    step(driver, locals_=4)
    assert only(LimitInstances, driver.watch(1.0)).most == 4
    driver.happen(StepEnded(100.0, JOB, 0, 1000, 10.0, 5.0, 0.0))
    driver.happen(StepBegan(100.0, JOB, 1, 1))
    driver.submit("next")
    assert only(LimitInstances, driver.watch(1.0)).most >= 1


def test_a_trainer_with_work_gets_its_devices_at_once_when_no_turn_is_live() -> None:
    driver = FleetDriver()
    driver.happen(StepBegan(0.0, JOB, 0, 50))  # more turns are expected than will come
    driver.join("local0", kind=InstanceKind.LOCAL)
    attempt = only_dispatch(driver.submit("t0"))
    driver.end("local0", attempt, 0)
    assert only(EndSeeding, driver.happen(TrainerWanted(1.0, JOB))).job == "job"


def test_a_trainer_with_work_waits_for_live_turns_and_no_longer_than_its_patience() -> None:
    driver = FleetDriver(trainer_patience_s=10.0, stall_s=100.0, lease_s=100.0)
    step(driver)
    assert none_of(EndSeeding, driver.happen(TrainerWanted(0.0, JOB)))
    assert none_of(EndSeeding, driver.watch(9.0))
    commands = driver.watch(1.0)
    assert only(EndSeeding, commands).reason == "the trainer has waited 10 s"
    assert only(ReleaseInstance, commands).instance == "local0"
    assert only(ResumeSeeding, driver.manager_hears(TrainerWaits(11.0, JOB, 0, 1.0))).job == "job"


def test_the_last_turn_gives_a_waiting_trainer_its_devices() -> None:
    driver = FleetDriver()
    driver.happen(StepBegan(0.0, JOB, 0, 50))
    driver.join("local0", kind=InstanceKind.LOCAL)
    attempt = only_dispatch(driver.submit("t0"))
    assert none_of(EndSeeding, driver.happen(TrainerWanted(1.0, JOB)))
    assert only(EndSeeding, driver.end("local0", attempt, 0)).job == "job"


def test_a_local_engine_where_another_job_seeds_is_kept_until_that_ends_too() -> None:
    """Two jobs of one base model: each has a step of its own, and its own turns to wait for."""
    driver = FleetDriver(seeding=AdaptiveWindow(initial_s=1000.0))
    driver.happen(StepBegan(0.0, JOB, 0, 1))
    driver.happen(StepBegan(0.0, OTHER, 0, 1))
    driver.join("local0", kind=InstanceKind.LOCAL)
    mine = only_dispatch(driver.submit("t0"))
    theirs = only_dispatch(driver.submit("t1", job=OTHER))
    commands = driver.end("local0", mine, 0)
    assert only(EndSeeding, commands).job == JOB
    assert none_of(ReleaseInstance, commands)
    commands = driver.end("local0", theirs, 0)
    assert only(EndSeeding, commands).job == OTHER
    assert only(ReleaseInstance, commands).instance == "local0"


def test_a_step_that_is_dropped_gives_its_engines_back_and_is_forgotten() -> None:
    driver = FleetDriver(seeding=AdaptiveWindow(initial_s=1000.0))
    step(driver, turns=1)
    driver.end("local0", 1, 0)
    driver.happen(StepBegan(1.0, JOB, 1, 5))
    driver.join("local0", kind=InstanceKind.LOCAL)
    commands = driver.happen(StepDropped(2.0, JOB))
    assert only(EndSeeding, commands).reason == "the job ended"
    assert only(ReleaseInstance, commands).instance == "local0"
    assert JOB not in driver.manager.state.work


def only_dispatch(commands: list[FleetCommand]) -> int:
    (sent,) = dispatches(commands)
    return sent.attempt
