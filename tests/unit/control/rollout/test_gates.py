"""A job that takes part in sharing runs where its permit says, and on what no permit is for."""

import pytest
from fleet_driver import FleetDriver, dispatches, only

from slackwater.control.rollout.events import JobGated
from slackwater.control.rollout.gates import TurnGate
from slackwater.control.weights.commands import PullVersion
from slackwater.control.weights.events import WeightsPublished
from slackwater.model.ids import JobId, NodeId
from slackwater.model.instance import InstanceKind

JOB, NODE = JobId("job"), NodeId("rollout-0")
OPEN, CLOSED = TurnGate((NODE,)), TurnGate()


@pytest.mark.parametrize("kind", [InstanceKind.SPOT, InstanceKind.BORROWED])
def test_spot_and_borrowed_instances_take_turns_of_a_job_with_a_permit(kind: InstanceKind) -> None:
    driver = FleetDriver()
    driver.join("extra", kind=kind)
    driver.happen(JobGated(0.0, JOB, CLOSED))
    assert not dispatches(driver.submit("t")), "without a permit it waits"
    (sent,) = dispatches(driver.happen(JobGated(0.0, JOB, OPEN)))
    assert sent.instance == "extra"


def test_the_tail_of_a_rollout_may_end_on_an_instance_that_nobody_waits_for() -> None:
    driver = FleetDriver()
    driver.join("spot", kind=InstanceKind.SPOT)
    driver.happen(JobGated(0.0, JOB, OPEN))
    driver.submit("t")
    tail = TurnGate((NODE,), only=())
    assert not driver.happen(JobGated(0.0, JOB, tail)), "it stays where it is"


def test_other_instances_without_a_place_and_those_of_other_nodes_take_none() -> None:
    driver = FleetDriver()
    driver.join("own", kind=InstanceKind.DEDICATED)
    driver.join("spot", kind=InstanceKind.SPOT, place=NodeId("rollout-1"))
    driver.happen(JobGated(0.0, JOB, OPEN))
    assert not dispatches(driver.submit("t"))


def test_the_weights_of_a_job_go_where_its_permit_lets_it_run() -> None:
    driver = FleetDriver()
    for name in ("a", "b"):
        driver.join(name, version="base", kind=InstanceKind.DEDICATED, place=NodeId(name))
    driver.happen(WeightsPublished(0.0, JOB, "v2"))
    driver.happen(JobGated(0.0, JOB, TurnGate((NodeId("b"),))))
    pull = only(PullVersion, driver.submit("t", version="v2"))
    assert pull.instance == "b", "the turns may not run on the first by name"
    moved = driver.happen(JobGated(1.0, JOB, TurnGate((NodeId("a"),))))
    assert only(PullVersion, moved).instance == "a"
