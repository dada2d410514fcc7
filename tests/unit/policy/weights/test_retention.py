"""What a store may drop."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.payload import Payload
from slackwater.policy.weights.pull_route import Delta, PullRoutePolicy
from slackwater.policy.weights.retention import StoredVersions, find_drops

FREE_STEPS = PullRoutePolicy(step_bytes=0)


def shelf(versions: int, **leaning: set[str]) -> StoredVersions:
    order = tuple(f"v{number}" for number in range(versions))
    deltas = [Delta(f"v{n}", f"v{n + 1}", 10) for n in range(versions - 1)]
    return StoredVersions(order, dict.fromkeys(order, 100), deltas, **leaning)


def dropped(stored: StoredVersions) -> tuple[list[str], list[Payload]]:
    """The versions whose wholes go, and the deltas that go."""
    gone = find_drops(stored, FREE_STEPS)
    return [p.version for p in gone if not p.base], [p for p in gone if p.base]


def test_only_the_newest_stays_if_nobody_leans_on_the_others() -> None:
    wholes, deltas = dropped(shelf(4))
    assert wholes == ["v0", "v1", "v2"]
    assert len(deltas) == 3


def test_the_chain_from_a_held_version_stays() -> None:
    wholes, deltas = dropped(shelf(4, held={"v1"}))
    assert wholes == ["v0", "v1", "v2"]
    assert deltas == [Payload("v1", "v0")]


def test_a_chain_that_is_longer_than_the_whole_may_go() -> None:
    assert len(dropped(shelf(14, held={"v0"}))[1]) == 13


def test_a_pinned_version_stays_readable_whole() -> None:
    assert dropped(shelf(4, pinned={"v1"}))[0] == ["v0", "v2"]


def test_what_is_being_read_stays_however_it_is_read() -> None:
    wholes, deltas = dropped(shelf(4, reading={"v1"}))
    assert "v1" not in wholes
    assert Payload("v1", "v0") not in deltas


def test_an_empty_shelf_has_nothing_to_drop() -> None:
    assert dropped(shelf(0)) == ([], [])


SOME = st.sets(st.sampled_from([f"v{number}" for number in range(8)]), max_size=3)


@given(st.integers(1, 8), SOME, SOME, SOME)
def test_after_the_drops_everyone_still_comes_to_what_they_need(
    versions: int, pinned: set[str], held: set[str], reading: set[str]
) -> None:
    before = shelf(versions, pinned=pinned, held=held, reading=reading)
    gone = find_drops(before, FREE_STEPS)
    wholes = {v: size for v, size in before.wholes.items() if Payload(v) not in gone}
    deltas = [delta for delta in before.deltas if Payload(delta.version, delta.base) not in gone]
    newest = before.order[-1]
    for version in {newest, *(pinned | reading) & set(before.order)}:
        assert FREE_STEPS.choose(version, (), wholes, deltas) is not None
    for version in held & set(before.order):
        was = FREE_STEPS.choose(newest, {version}, before.wholes, before.deltas)
        now = FREE_STEPS.choose(newest, {version}, wholes, deltas)
        assert was is not None and now is not None
        assert was.bytes == now.bytes
