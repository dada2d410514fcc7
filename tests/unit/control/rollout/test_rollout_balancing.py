"""Balancing moves turns only where they can go on, and as well beside other models as alone."""

import pytest
from fleet_driver import FleetDriver, dispatches

from slackwater.control.rollout.commands import DispatchTurn
from slackwater.control.rollout.events import InstanceHeartbeat, InstanceLost
from slackwater.model.ids import InstanceId
from slackwater.model.instance import InstanceKind
from slackwater.policy.rollout.balancing import FillIdle
from slackwater.policy.rollout.routing import ShortestQueue


def heartbeat(driver: FleetDriver, name: str, running: int, waiting: int, made: int) -> None:
    driver.happen(
        InstanceHeartbeat(driver.now_s, InstanceId(name), running, waiting, made, running * 10, 0)
    )


def moved(driver: FleetDriver, others: dict[str, dict[str, str]]) -> list[DispatchTurn]:
    """Pending turns pile up on one instance of a job, then another of the same job joins."""
    driver.join("full", max_running=2, job="job")
    for name, spec in others.items():
        driver.join(name, version=spec["version"], job=spec["job"])
    for number in range(6):
        driver.submit(f"t{number}")
    driver.join("empty", max_running=8, job="job")
    heartbeat(driver, "full", 2, 4, 10)
    return dispatches(driver.watch(1.0))


@pytest.mark.parametrize(
    "others",
    [
        {"idle": {"job": "another model", "version": "v1"}},
        {"idle": {"job": "job", "version": "v0"}},
        {"a": {"job": "another model", "version": "v9"}, "z": {"job": "job", "version": "v0"}},
    ],
)
def test_an_idle_instance_of_another_model_or_version_stops_no_move(
    others: dict[str, dict[str, str]],
) -> None:
    def fresh() -> FleetDriver:
        return FleetDriver(routing=ShortestQueue(pending_limit=4))

    alone, beside = moved(fresh(), {}), moved(fresh(), others)
    assert alone
    assert [(d.instance, d.turn) for d in beside] == [(d.instance, d.turn) for d in alone]
    assert {d.instance for d in beside} == {"empty"}


def test_a_turn_that_was_begun_exactly_is_never_moved_to_an_engine_that_is_not() -> None:
    driver = FleetDriver(balancing=FillIdle())
    driver.join("exact")
    (first,) = dispatches(driver.submit("begun"))
    driver.tokens("exact", first.attempt, [5, 6])
    driver.join("vllm", exact_continuation=False, kind=InstanceKind.DEDICATED)
    lost = driver.happen(InstanceLost(driver.now_s, InstanceId("exact"), "killed"))
    assert not dispatches(lost)
    assert not dispatches(driver.watch(5.0))
    (new,) = dispatches(driver.submit("new"))  # what waits does not hold up what may go there
    assert new.instance == "vllm"
    (again,) = dispatches(driver.join("exact again"))
    assert (again.turn, list(again.generated)) == ("begun", [5, 6])


def test_a_turn_that_an_inexact_engine_began_may_go_on_anywhere() -> None:
    driver = FleetDriver()
    driver.join("vllm", exact_continuation=False)
    (first,) = dispatches(driver.submit("begun"))
    driver.tokens("vllm", first.attempt, [5])
    driver.join("vllm2", exact_continuation=False)
    (again,) = dispatches(driver.happen(InstanceLost(driver.now_s, InstanceId("vllm"), "killed")))
    assert again.instance == "vllm2"


def beat_for(driver: FleetDriver, seconds: int, rates: dict[str, tuple[int, int]]) -> None:
    """Each instance makes so many tokens in even and in odd seconds."""
    made = dict.fromkeys(rates, 0)
    for second in range(seconds):
        for name, rate in rates.items():
            made[name] += rate[second % 2]
            heartbeat(driver, name, 4, 0, made[name])
        driver.now_s += 1.0


def slowness(driver: FleetDriver, name: str) -> float:
    return driver.manager.state.instances.records[InstanceId(name)].load.slowness


def test_a_loan_with_uneven_steps_makes_no_own_engine_look_slow() -> None:
    driver = FleetDriver()
    driver.join("own", kind=InstanceKind.DEDICATED)
    driver.join("loan", kind=InstanceKind.BORROWED, job="job")
    beat_for(driver, 600, {"own": (400, 400), "loan": (40, 400)})
    assert slowness(driver, "own") == 1.0
    assert 2.0 < slowness(driver, "loan") < 5.0
    driver.join("next loan", kind=InstanceKind.BORROWED, job="job")
    assert slowness(driver, "next loan") == slowness(driver, "loan")


def test_engines_with_uneven_steps_do_not_look_slower_and_slower() -> None:
    driver = FleetDriver()
    driver.join("even", kind=InstanceKind.DEDICATED)
    driver.join("uneven", kind=InstanceKind.SPOT)
    beat_for(driver, 2000, {"even": (400, 400), "uneven": (100, 400)})
    assert 0.4 < slowness(driver, "even") < 2.0
    assert 1.5 < slowness(driver, "uneven") / slowness(driver, "even") < 3.0
