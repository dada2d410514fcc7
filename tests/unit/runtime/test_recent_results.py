"""Outcomes of actions in memory: bounded by bytes, whatever the actions print."""

from slackwater.model.ids import ActionId, TenantId
from slackwater.runtime.services.action_table import RecentResults
from slackwater.runtime.store.action_log import ActionResult

TENANT = TenantId("t")


def result(printed: int) -> ActionResult:
    return ActionResult(kind="done", reason="", stdout=bytes(printed))


def test_long_outputs_do_not_pile_up() -> None:
    recent = RecentResults(most_bytes=10_000)
    for number in range(100):
        recent.add(ActionId(f"a{number}"), TENANT, result(3000))
        assert recent.held_bytes <= 10_000
    assert recent.find(ActionId("a99")) == (TENANT, result(3000))
    assert recent.find(ActionId("a96")) == (None, None)


def test_one_that_is_too_large_is_left_to_the_store() -> None:
    recent = RecentResults(most_bytes=10_000)
    recent.add(ActionId("small"), TENANT, result(10))
    recent.add(ActionId("large"), TENANT, result(10_001))
    assert recent.find(ActionId("large")) == (None, None)
    assert recent.held_bytes == 0


def test_the_oldest_of_many_go_and_the_same_name_counts_once() -> None:
    recent = RecentResults(most_results=2)
    for name in ("a", "b", "b", "c"):
        recent.add(ActionId(name), TENANT, result(5))
    assert recent.find(ActionId("a")) == (None, None)
    assert recent.held_bytes == 10
