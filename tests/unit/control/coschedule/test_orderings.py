"""Whose phase runs next."""

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase
from slackwater.policy.ordering.priority import (
    FirstComeFirstServed,
    HighestResponseRatio,
    WaitingPhase,
)


def waiting(
    name: str, *nodes: str, since_s: float = 0.0, service_s: float = 100.0, setup_s: float = 0.0
) -> WaitingPhase:
    return WaitingPhase(
        JobId(name), Phase.TRAIN, tuple(NodeId(n) for n in nodes), since_s, service_s, setup_s
    )


def anything(request: WaitingPhase) -> bool:
    return True


def test_setup_costs_let_the_resident_job_go_first() -> None:
    requests = [waiting("a", "n", setup_s=50), waiting("b", "n")]
    picked = HighestResponseRatio().pick(requests, anything, now_s=60)
    assert picked is not None and picked.job == "b"


def test_who_waits_long_enough_overtakes_the_resident_job() -> None:
    requests = [waiting("a", "n", setup_s=50), waiting("b", "n", since_s=300)]
    picked = HighestResponseRatio().pick(requests, anything, now_s=301)
    assert picked is not None and picked.job == "a"


def test_short_work_goes_before_long_work_that_has_waited_as_long() -> None:
    requests = [waiting("long", "n", service_s=500), waiting("short", "n", service_s=20)]
    picked = HighestResponseRatio().pick(requests, anything, now_s=30)
    assert picked is not None and picked.job == "short"


def test_first_come_is_first_served_whatever_the_length() -> None:
    requests = [waiting("short", "n", since_s=2, service_s=1), waiting("long", "n", since_s=1)]
    picked = FirstComeFirstServed().pick(requests, anything, now_s=10)
    assert picked is not None and picked.job == "long"


def test_a_gang_that_waits_for_one_node_keeps_its_others_from_later_comers() -> None:
    requests = [waiting("gang", "n1", "n2"), waiting("late", "n1", since_s=5)]
    free = {"n1"}
    picked = FirstComeFirstServed().pick(requests, lambda r: free.issuperset(r.nodes), now_s=9)
    assert picked is None


def test_work_on_other_nodes_passes_a_gang_that_waits() -> None:
    requests = [waiting("gang", "n1", "n2"), waiting("late", "n3", since_s=5)]
    free = {"n1", "n3"}
    picked = FirstComeFirstServed().pick(requests, lambda r: free.issuperset(r.nodes), now_s=9)
    assert picked is not None and picked.job == "late"
