"""Whole or chain of deltas: the cheapest way to a version."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from slackwater.policy.weights.pull_route import Delta, PullRoute, PullRoutePolicy

CHAIN = [Delta("v0", "v1", 10), Delta("v1", "v2", 10), Delta("v2", "v3", 10)]
FREE_STEPS = PullRoutePolicy(step_bytes=0)


def test_one_version_behind_takes_the_delta() -> None:
    assert FREE_STEPS.choose("v3", {"v2"}, {"v3": 1000}, CHAIN) == PullRoute(
        "v2", False, (CHAIN[2],), 10
    )


def test_far_behind_takes_the_chain_while_it_is_smaller_than_the_whole() -> None:
    assert FREE_STEPS.choose("v3", {"v0"}, {"v3": 31}, CHAIN) == PullRoute(
        "v0", False, tuple(CHAIN), 30
    )
    assert FREE_STEPS.choose("v3", {"v0"}, {"v3": 29}, CHAIN) == PullRoute("v3", True, (), 29)


def test_steps_have_a_price_too() -> None:
    assert PullRoutePolicy(step_bytes=5).choose("v3", {"v0"}, {"v3": 40}, CHAIN) == PullRoute(
        "v3", True, (), 40
    )


def test_a_newcomer_takes_an_older_whole_and_the_deltas_if_that_is_all_there_is() -> None:
    way = FREE_STEPS.choose("v3", (), {"v1": 500}, CHAIN)
    assert way == PullRoute("v1", True, tuple(CHAIN[1:]), 520)


def test_a_version_that_is_held_needs_nothing() -> None:
    assert FREE_STEPS.choose("v3", {"v3"}, {"v3": 1}, CHAIN) == PullRoute("v3", False, (), 0)


def test_what_leads_nowhere_is_none() -> None:
    assert FREE_STEPS.choose("v9", {"v0"}, {"v3": 1}, CHAIN) is None


def test_two_ways_of_one_price_are_told_apart_by_name() -> None:
    both = [Delta("a", "v", 10), Delta("b", "v", 10)]
    assert FREE_STEPS.choose("v", {"b", "a"}, {}, both) == PullRoute("a", False, (both[0],), 10)


NAMES = [f"v{number}" for number in range(6)]


def ways(held: set[str], wholes: dict[str, int], deltas: list[Delta]) -> dict[str, int]:
    """The cost of every version by relaxing until nothing changes."""
    cost = wholes | dict.fromkeys(held, 0)
    for _ in NAMES:
        for delta in deltas:
            if delta.base in cost:
                reached = cost[delta.base] + delta.bytes
                cost[delta.version] = min(cost.get(delta.version, reached), reached)
    return cost


@given(
    st.sets(st.sampled_from(NAMES)),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 100)),
    st.lists(st.builds(Delta, st.sampled_from(NAMES), st.sampled_from(NAMES), st.integers(1, 60))),
)
def test_the_way_is_the_cheapest_and_can_be_walked(
    held: set[str], wholes: dict[str, int], deltas: list[Delta]
) -> None:
    best = ways(held, wholes, deltas)
    for target in NAMES:
        way = FREE_STEPS.choose(target, held, wholes, deltas)
        if way is None:
            assert target not in best
            continue
        assert way.bytes == best[target]
        assert way.start in (wholes if way.fetch_start else held)
        stops = [way.start, *(delta.version for delta in way.deltas)]
        assert stops[-1] == target
        assert [(d.base, d.version) for d in way.deltas] == list(pairwise(stops))
