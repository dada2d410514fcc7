"""A job that takes part in sharing runs where its permit says, and on what no permit is for."""

import pytest
from fleet_driver import FleetDriver, dispatches

from slackwater.control.rollout.events import JobGated
from slackwater.control.rollout.gates import TurnGate
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
