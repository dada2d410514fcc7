"""Who takes a version from whom: one copy per slow link."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.weights.simulated.flat_source import FlatSource
from slackwater.policy.weights.source import PayloadHolder, PayloadSource, TreeSource

TRAINER = PayloadHolder("trainer", "t0", "train")


def member(name: str, node: str = "n", site: str = "rollout") -> PayloadHolder:
    return PayloadHolder(name, node, site, complete=False)


def test_the_first_of_a_site_crosses_the_slow_link_and_the_next_takes_it_from_the_first() -> None:
    first = member("a", "n0")
    assert TreeSource().choose(first, [TRAINER]) == PayloadSource("trainer", crosses=True)
    fed = replace(first, depth=1)
    assert TreeSource().choose(member("b", "n1"), [TRAINER, fed]) == PayloadSource(
        "a", crosses=False
    )


def test_the_same_node_is_nearer_than_the_same_site() -> None:
    there, here = member("a", "n0"), replace(member("b", "n1"), depth=3)
    assert TreeSource().choose(member("c", "n1"), [there, here]) == PayloadSource(
        "b", crosses=False
    )


def test_a_busy_site_makes_one_wait_rather_than_cross() -> None:
    busy = replace(member("a"), feeds=2)
    assert TreeSource(max_feeds=2).choose(member("b"), [TRAINER, busy]) is None


def test_flat_lets_everybody_cross() -> None:
    near = replace(member("a"), depth=1)
    assert FlatSource().choose(member("b"), [TRAINER, near]) == PayloadSource(
        "trainer", crosses=True
    )


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 2)), max_size=24), st.integers(1, 4)
)
def test_however_many_join_each_site_is_crossed_to_once_and_nobody_is_left_out(
    joins: list[tuple[str, int]], max_feeds: int
) -> None:
    policy = TreeSource(max_feeds=max_feeds)
    holders = {"trainer": TRAINER}
    crossed: list[str] = []
    for number, (site, node) in enumerate(joins):
        puller = member(f"m{number:02}", f"{site}{node}", site)
        source = policy.choose(puller, list(holders.values()))
        assert source is not None  # a tree with room at its leaves always has a place
        fed_by = holders[source.member]
        holders[source.member] = replace(fed_by, feeds=fed_by.feeds + 1)
        holders[puller.member] = replace(puller, depth=fed_by.depth + 1)
        if source.crosses:
            crossed.append(site)
    assert len(crossed) == len(set(crossed)) == len({site for site, _ in joins})
    near = [holder for holder in holders.values() if holder.site != "train"]
    assert all(holder.feeds <= max_feeds for holder in near)
