"""Instances come and go; turns do not notice."""

from typing import Any

import pytest
from fleet_driver import FleetDriver, dispatches, instance_spec, none_of, only

from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.rollout.commands import (
    AbortTurn,
    FailTurn,
    ReleaseInstance,
    ReportFault,
)
from slackwater.control.rollout.events import (
    BudgetChanged,
    DrainRequested,
    InstanceHeartbeat,
    InstanceJoined,
    InstanceLost,
    InstanceNotice,
    TurnRefused,
)
from slackwater.control.weights.commands import DeleteVersion, DropVersion, PullVersion
from slackwater.control.weights.events import (
    InstanceReady,
    PullFailed,
    WeightsPublished,
    WeightsRetired,
)
from slackwater.model.ids import InstanceId, JobId, TurnId
from slackwater.model.instance import InstanceKind, InstanceState

A, B = InstanceId("a"), InstanceId("b")


def beat(driver: FleetDriver, name: str, **load: Any) -> list[FleetCommand]:
    fields = {"running": 0, "waiting": 0, "produced_tokens": 0, "kv_used_tokens": 0} | load
    return driver.happen(InstanceHeartbeat(driver.now_s, InstanceId(name), **fields))


def test_an_instance_joins_pulls_the_newest_version_and_is_ready_in_mid_step() -> None:
    driver = FleetDriver()
    driver.happen(WeightsPublished(0.0, JobId("job"), "v7"))
    driver.submit("t", version="v7")
    pull = only(PullVersion, driver.happen(InstanceJoined(0.0, instance_spec("a"))))
    assert (pull.instance, pull.version) == ("a", "v7")
    records = driver.manager.state.instances.records
    assert records[A].state is InstanceState.JOINING
    assert driver.controller.weights.pulling(A) == {"v7"}
    (sent,) = dispatches(driver.happen(InstanceReady(1.0, A, "v7")))
    assert (sent.turn, sent.version) == ("t", "v7")
    assert records[A].state is InstanceState.READY


def test_a_version_nobody_holds_is_pulled_on_demand_by_one_instance_at_a_time() -> None:
    driver = FleetDriver()
    driver.join("a")
    driver.join("b")
    first = driver.submit("t", version="v2")
    assert only(PullVersion, first).version == "v2"
    assert none_of(PullVersion, driver.submit("u", version="v2"))


def test_a_failed_pull_is_reported_and_asked_for_again() -> None:
    driver = FleetDriver()
    driver.join("a")
    driver.submit("t", version="v2")
    failed = driver.happen(PullFailed(0.0, A, "v2", "link down"))
    assert "link down" in only(ReportFault, failed).what
    assert only(PullVersion, driver.watch(1.0)).version == "v2"


def test_versions_beyond_the_limit_are_dropped_least_recently_used_first() -> None:
    driver = FleetDriver()
    driver.join("a", version="base", max_versions=2)
    for number in (1, 2, 3):
        driver.happen(WeightsPublished(0.0, JobId("job"), f"v{number}"))
        if number == 1:
            driver.submit("t", version="v1")
        dropped = driver.happen(InstanceReady(0.0, A, f"v{number}"))
        driver.end("a", 1, 0, version="v1")
    assert only(DropVersion, dropped).version == "v1"


def test_a_retired_version_stays_as_long_as_a_turn_asks_for_it_and_is_then_deleted() -> None:
    driver = FleetDriver()
    driver.join("a")
    driver.join("b")
    (sent,) = dispatches(driver.submit("t"))
    assert none_of(DropVersion, driver.happen(WeightsRetired(0.0, "v1")))
    ended = driver.end(sent.instance, sent.attempt, 0)
    assert [c.instance for c in ended if isinstance(c, DropVersion)] == ["a", "b"]
    assert only(DeleteVersion, ended).version == "v1"


def test_an_instance_goes_when_its_lease_ends_and_not_before() -> None:
    driver = FleetDriver(lease_s=10.0)
    driver.join("a")
    driver.submit("t")
    driver.now_s = 9.0
    driver.join("b")
    beat(driver, "b")
    assert none_of(ReleaseInstance, driver.watch(1.0))
    commands = driver.watch(0.5)
    assert only(ReleaseInstance, commands).instance == "a"
    (moved,) = dispatches(commands)
    assert moved.instance == "b"


def test_what_a_declared_dead_instance_says_later_makes_it_go() -> None:
    driver = FleetDriver(lease_s=10.0)
    driver.join("a")
    driver.watch(11.0)
    commands = beat(driver, "a")
    assert [type(command) for command in commands] == [ReleaseInstance]


def test_turns_leave_a_borrowed_instance_that_stalls_and_come_back_when_it_goes_on() -> None:
    driver = FleetDriver(borrowed_stall_s=2.0)
    driver.join("a", kind=InstanceKind.BORROWED)
    (sent,) = dispatches(driver.submit("t"))
    driver.now_s = 1.9
    beat(driver, "a", running=1)
    assert none_of(AbortTurn, driver.watch(0.0))
    driver.now_s = 2.1
    beat(driver, "a", running=1)
    stalled = driver.watch(0.0)
    assert only(AbortTurn, stalled).attempt == sent.attempt
    assert dispatches(stalled) == []
    assert [d.instance for d in dispatches(beat(driver, "a"))] == ["a"]


def test_an_instance_that_produces_is_not_stalled_even_if_its_frames_are_slow() -> None:
    driver = FleetDriver(borrowed_stall_s=2.0)
    driver.join("a", kind=InstanceKind.BORROWED)
    driver.submit("t")
    for produced in range(1, 5):
        driver.now_s += 1.5
        beat(driver, "a", running=1, produced_tokens=produced)
        assert none_of(AbortTurn, driver.watch(0.0))


def test_a_notice_moves_every_turn_while_both_ends_still_live() -> None:
    driver = FleetDriver()
    driver.join("a")
    (sent,) = dispatches(driver.submit("t"))
    driver.tokens("a", sent.attempt, [5])
    driver.join("b")
    commands = driver.happen(InstanceNotice(1.0, A, 31.0))
    assert [list(d.generated) for d in dispatches(commands)] == [[5]]
    assert only(ReleaseInstance, commands).instance == "a"


def test_a_draining_instance_finishes_what_it_runs_takes_nothing_new_and_goes() -> None:
    driver = FleetDriver()
    driver.join("a")
    (sent,) = dispatches(driver.submit("t"))
    assert none_of(ReleaseInstance, driver.happen(DrainRequested(0.0, A)))
    assert dispatches(driver.submit("u")) == []
    driver.tokens("a", sent.attempt, [5])
    driver.end("a", sent.attempt, 1)
    assert only(ReleaseInstance, driver.watch(1.0)).reason == "drained"


def test_a_cut_budget_moves_the_youngest_turns_first() -> None:
    driver = FleetDriver()
    driver.join("a", kind=InstanceKind.BORROWED, max_running=3)
    sent = [dispatches(driver.submit(name))[0] for name in ("t", "u", "v")]
    commands = driver.happen(BudgetChanged(1.0, A, 1, 4000))
    aborted = [command.attempt for command in commands if isinstance(command, AbortTurn)]
    assert aborted == [sent[2].attempt, sent[1].attempt]


def test_a_turn_given_back_is_not_sent_straight_back() -> None:
    driver = FleetDriver()
    driver.join("a")
    (sent,) = dispatches(driver.submit("t"))
    assert dispatches(driver.happen(TurnRefused(0.0, A, sent.attempt, "no room", False))) == []
    assert [d.turn for d in dispatches(beat(driver, "a"))] == ["t"]


def test_an_instance_lent_to_one_job_serves_no_other() -> None:
    driver = FleetDriver()
    driver.join("a", job=JobId("mine"))
    assert dispatches(driver.submit("t", job="other")) == []
    assert [d.turn for d in dispatches(driver.submit("u", job="mine"))] == ["u"]


def test_staleness_lets_a_turn_run_on_an_older_version_that_the_job_allows() -> None:
    driver = FleetDriver()
    driver.join("a", version="v1")
    assert dispatches(driver.submit("strict", version="v2")) == []
    (sent,) = dispatches(driver.submit("stale", version="v2", also_versions=("v1",)))
    assert sent.version == "v1"


def test_joining_again_under_the_same_name_is_a_new_life() -> None:
    driver = FleetDriver()
    driver.join("a")
    (sent,) = dispatches(driver.submit("t"))
    commands = driver.join("a")
    (again,) = dispatches(commands)
    assert again.attempt != sent.attempt
    assert none_of(FailTurn, commands)


def test_a_version_that_nobody_asked_for_is_a_fault_and_is_not_believed() -> None:
    driver = FleetDriver()
    driver.join("a")
    commands = driver.happen(InstanceReady(0.0, A, "v9"))
    assert "v9" in only(ReportFault, commands).what
    assert dispatches(driver.submit("t", version="v9")) == []


def test_a_moved_turn_does_not_make_its_trajectory_one_that_comes_back() -> None:
    driver = FleetDriver()
    driver.join("a")
    driver.submit("t1", trajectory="c")
    driver.join("b")
    driver.happen(InstanceLost(1.0, A, "preempted"))
    load = driver.manager.state.instances.records[B].load
    assert (load.in_flight, load.residents) == (1, 0)
    driver.tokens("b", 2, [5])
    driver.end("b", 2, 1)
    driver.submit("t2", trajectory="c", prompt=(1, 2, 3, 5))
    assert load.residents == 1
    assert load.resident_tokens >= 4


def test_an_instance_that_joins_again_under_its_name_is_nobodys_home() -> None:
    driver = FleetDriver()
    driver.join("a")
    for number, prompt in enumerate(((1, 2), (1, 2, 5, 6)), 1):
        driver.submit(f"t{number}", trajectory="c", prompt=prompt)
        driver.tokens("a", number, [5])
        driver.end("a", number, 1)
    assert driver.manager.state.instances.records[A].load.resident_tokens >= 5
    driver.happen(InstanceLost(1.0, A, "killed"))
    driver.join("a")
    assert driver.manager.state.instances.records[A].load.residents == 0
    driver.submit("t3", trajectory="c")
    assert driver.manager.state.instances.records[A].load.residents == 1


def test_a_trajectory_that_does_not_return_leaves_the_working_set() -> None:
    driver = FleetDriver()
    driver.join("a")
    for number in (1, 2):
        driver.submit(f"t{number}", trajectory="c", prompt=(1,) * number)
        driver.tokens("a", number, [5])
        driver.end("a", number, 1)
    load = driver.manager.state.instances.records[A].load
    assert load.residents == 1
    homes = driver.manager.dispatcher.homes
    assert homes.expire(1e6) == [driver.manager.state.instances.records[A]]
    assert (load.residents, load.resident_tokens) == (0, 0)
    homes.check_integrity()


def test_trajectories_that_have_long_ended_are_forgotten_and_open_ones_are_not() -> None:
    driver = FleetDriver(turn_timeout_s=1e6, lease_s=1e6)
    driver.join("a", max_running=64)
    driver.submit("open")
    for number in range(2, 50):
        driver.submit(f"t{number}")
        driver.tokens("a", number, [5])
        driver.end("a", number, 1)
    homes = driver.manager.dispatcher.homes
    driver.watch(299.0)
    assert len(homes) == 49
    driver.watch(2.0)
    assert len(homes) == 1
    driver.tokens("a", 1, [5])
    driver.end("a", 1, 1)
    driver.submit("back", trajectory="open")
    assert homes.has_home(driver.manager.state.turns[TurnId("back")]), "it was not forgotten"


def test_started_trajectories_go_before_new_ones() -> None:
    driver = FleetDriver()
    driver.join("a", max_running=1)
    driver.submit("c.1", trajectory="c")
    driver.submit("new", trajectory="n")
    driver.tokens("a", 1, [5])
    assert dispatches(driver.end("a", 1, 1))[0].turn == "new"
    driver.submit("later", trajectory="l")
    driver.submit("c.2", trajectory="c", prompt=(1, 2, 3, 5))
    driver.tokens("a", 2, [5])
    assert dispatches(driver.end("a", 2, 1))[0].turn == "c.2"


def test_what_a_step_takes_is_learned_while_turns_end_and_prompts_come() -> None:
    driver = FleetDriver()
    driver.join("a", max_running=64, kv_tokens=100_000)
    produced = prefilled = 0
    for beat in range(1, 40):
        running, fresh = 48 - beat, 20 * (beat % 3)
        steps = 50
        produced += steps * running
        prefilled += fresh
        driver.now_s += steps * (0.01 + 1e-4 * running) + 1e-3 * fresh
        driver.happen(
            InstanceHeartbeat(driver.now_s, A, running, 0, produced, 100 * running, prefilled)
        )
    model = driver.manager.state.step_time.model
    assert model is not None
    assert model.step_s(20, 2000) == pytest.approx(0.012, rel=0.05)


def test_a_trajectory_of_a_prompt_that_lasts_much_longer_starts_first() -> None:
    driver = FleetDriver()
    driver.join("a", max_running=2)
    driver.submit("short.1", prompt=(1,))
    driver.submit("long.1", prompt=(2,))
    for name in ("short.2", "short.3", "long.2"):
        driver.submit(name, prompt=(2,) if name == "long.2" else (1,))
    for attempt in (1, 2):
        driver.tokens("a", attempt, [5])
    driver.now_s = 1.0
    assert dispatches(driver.end("a", 1, 1))[0].turn == "short.2", "nothing is known yet"
    driver.submit("short.4", prompt=(1,))
    driver.now_s = 6.0
    assert dispatches(driver.end("a", 2, 1))[0].turn == "short.3"
    driver.submit("short.5", prompt=(1,))
    driver.submit("long.3", prompt=(2,))
    driver.watch(1.0)
    driver.tokens("a", 3, [5])
    assert dispatches(driver.end("a", 3, 1))[0].turn == "long.2"
    driver.tokens("a", 4, [5])
    assert dispatches(driver.end("a", 4, 1))[0].turn == "long.3"
