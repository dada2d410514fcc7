"""Balancing moves turns only where they can go on, and as well beside other models as alone."""

import pytest
from fleet_driver import FleetDriver, dispatches

from slackwater.control.rollout.commands import Dispatch
from slackwater.control.rollout.events import InstanceHeartbeat, InstanceLost
from slackwater.model.ids import InstanceId
from slackwater.model.instance import InstanceKind
from slackwater.policy.rollout.balancing import FillIdle
from slackwater.policy.rollout.routing import ShortestQueue


def heartbeat(driver: FleetDriver, name: str, running: int, waiting: int, made: int) -> None:
    driver.happen(
        InstanceHeartbeat(driver.now_s, InstanceId(name), running, waiting, made, running * 10, 0)
    )


def moved(driver: FleetDriver, others: dict[str, dict[str, str]]) -> list[Dispatch]:
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
