"""What a store may drop."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.policy.weights.pull_route import Delta, PullRoutePolicy
from slackwater.policy.weights.retention import RetentionByNeed, StoredVersions

FREE_STEPS = PullRoutePolicy(step_bytes=0)
KEEP = RetentionByNeed(keep_newest=1, way=FREE_STEPS)


def shelf(versions: int, **leaning: set[str]) -> StoredVersions:
    order = tuple(f"v{number}" for number in range(versions))
    deltas = [Delta(f"v{n}", f"v{n + 1}", 10) for n in range(versions - 1)]
    return StoredVersions(order, dict.fromkeys(order, 100), deltas, **leaning)


def test_only_the_newest_stays_if_nobody_leans_on_the_others() -> None:
    drops = KEEP.decide(shelf(4))
    assert drops.wholes == ("v0", "v1", "v2")
    assert len(drops.deltas) == 3


def test_the_chain_from_a_held_version_stays() -> None:
    drops = KEEP.decide(shelf(4, held={"v1"}))
    assert drops.wholes == ("v0", "v1", "v2")
    assert drops.deltas == (Delta("v0", "v1", 10),)


def test_a_chain_that_is_longer_than_the_whole_may_go() -> None:
    drops = KEEP.decide(shelf(14, held={"v0"}))
    assert len(drops.deltas) == 13


def test_a_pinned_version_stays_readable_whole() -> None:
    assert KEEP.decide(shelf(4, pinned={"v1"})).wholes == ("v0", "v2")


def test_what_is_being_read_stays_however_it_is_read() -> None:
    drops = KEEP.decide(shelf(4, reading={"v1"}))
    assert "v1" not in drops.wholes
    assert Delta("v0", "v1", 10) not in drops.deltas


def test_an_empty_shelf_has_nothing_to_drop() -> None:
    assert KEEP.decide(shelf(0)).wholes == ()


SOME = st.sets(st.sampled_from([f"v{number}" for number in range(8)]), max_size=3)


@given(st.integers(1, 8), SOME, SOME, SOME, st.integers(1, 3))
def test_after_the_drops_everyone_still_comes_to_what_they_need(
    versions: int, pinned: set[str], held: set[str], reading: set[str], keep_newest: int
) -> None:
    before = shelf(versions, pinned=pinned, held=held, reading=reading)
    drops = RetentionByNeed(keep_newest, FREE_STEPS).decide(before)
    wholes = {v: size for v, size in before.wholes.items() if v not in drops.wholes}
    deltas = [delta for delta in before.deltas if delta not in drops.deltas]
    newest = before.order[-1]
    for version in {newest, *(pinned | reading) & set(before.order)}:
        assert FREE_STEPS.choose(version, (), wholes, deltas) is not None
    for version in held & set(before.order):
        was = FREE_STEPS.choose(newest, {version}, before.wholes, before.deltas)
        now = FREE_STEPS.choose(newest, {version}, wholes, deltas)
        assert was is not None and now is not None
        assert was.bytes == now.bytes
