"""Permits: one phase per node, one permit per job."""

import pytest

from slackwater.control.coschedule.permits import Permit, Permits
from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase
from slackwater.policy.ordering.priority import WaitingPhase


def asks(name: str, phase: Phase = Phase.ROLLOUT, *nodes: str) -> WaitingPhase:
    return WaitingPhase(
        JobId(name), phase, tuple(NodeId(n) for n in nodes or ("n",)), 0.0, 1.0, 0.0
    )


def permit_of(desk: Permits, name: str) -> Permit:
    permit = desk.find_by_job(JobId(name))
    assert permit is not None
    return permit


def test_a_node_that_runs_a_phase_takes_no_other() -> None:
    desk = Permits()
    desk.grant(asks("a"), 1, 0.0)
    assert not desk.is_free(asks("b"))
    with pytest.raises(AssertionError, match="taken"):
        desk.grant(asks("b"), 1, 0.0)
    desk.check_integrity()


def test_a_switch_is_needed_when_the_state_on_the_node_is_anothers() -> None:
    desk = Permits()
    assert not desk.grant(asks("a"), 1, 0.0).switch
    desk.release(permit_of(desk, "a"))
    assert not desk.grant(asks("a"), 1, 1.0).switch
    desk.release(permit_of(desk, "a"))
    assert desk.grant(asks("b"), 1, 2.0).switch


def test_the_same_jobs_other_phase_on_the_same_node_is_a_switch_too() -> None:
    desk = Permits()
    desk.grant(asks("a", Phase.ROLLOUT), 1, 0.0)
    desk.release(permit_of(desk, "a"))
    assert desk.grant(asks("a", Phase.TRAIN), 1, 1.0).switch


def test_beside_a_tail_one_rollout_may_run_and_no_training() -> None:
    desk = Permits()
    desk.grant(asks("a"), 1, 0.0)
    desk.shrink(permit_of(desk, "a"))
    assert not desk.is_free(asks("b", Phase.TRAIN))
    desk.grant(asks("b"), 1, 1.0)
    assert not desk.is_free(asks("c"))
    desk.check_integrity()


def test_a_second_tail_waits_for_the_first() -> None:
    desk = Permits()
    desk.grant(asks("a"), 1, 0.0)
    desk.shrink(permit_of(desk, "a"))
    desk.grant(asks("b"), 1, 1.0)
    assert not desk.can_shrink(permit_of(desk, "b"))
    desk.release(permit_of(desk, "a"))
    assert desk.can_shrink(permit_of(desk, "b"))
    desk.check_integrity()


def test_a_node_in_use_cannot_be_given_back() -> None:
    desk = Permits()
    desk.grant(asks("a"), 1, 0.0)
    with pytest.raises(AssertionError, match="in use"):
        desk.forget([NodeId("n")])


def test_parts_of_a_node_run_side_by_side_and_the_whole_node_waits_for_all_of_them() -> None:
    desk = Permits()
    desk.grant(asks("a", Phase.TRAIN, "n/0-3"), 1, 0.0)
    desk.grant(asks("b", Phase.TRAIN, "n/4-7"), 1, 0.0)
    desk.check_integrity()
    assert not desk.is_free(asks("guest", Phase.TRAIN, "n"))
    assert not desk.is_free(asks("c", Phase.TRAIN, "n/2-3"))
    for name in ("a", "b"):
        desk.release(permit_of(desk, name))
    assert desk.grant(asks("guest", Phase.TRAIN, "n"), 1, 1.0)
    assert not desk.is_free(asks("a", Phase.TRAIN, "n/0-3"))
    desk.release(permit_of(desk, "guest"))
    assert desk.grant(asks("a", Phase.TRAIN, "n/0-3"), 1, 2.0).switch, "the guest's state was there"


def test_a_node_that_is_kept_for_a_guest_is_kept_in_all_its_parts() -> None:
    desk = Permits()
    desk.reserve([NodeId("n/0-3")], JobId("guest"))
    assert not desk.is_free(asks("a", Phase.TRAIN, "n"))
    assert not desk.is_free(asks("a", Phase.TRAIN, "n/2"))
    assert desk.is_free(asks("a", Phase.TRAIN, "n/4"))
