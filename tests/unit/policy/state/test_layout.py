"""How an image is laid out, who makes room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.errors import ConfigError
from slackwater.model.residency import StateBudgets, StateKey, StoredPart
from slackwater.policy.state.admission import DeploymentNeeds, ImageSize, explain_refusal
from slackwater.policy.state.eviction import EvictionCandidate, choose_victims
from slackwater.policy.state.layout import lay_out, merge_runs


def key(start: int, stop: int, kind: str = "weight") -> StateKey:
    return StateKey("j", "m", "p", kind, start, stop)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.sampled_from([2, 4]))))
def test_parts_do_not_overlap_and_replicas_are_stored_once(
    drawn: list[tuple[str, int, int]],
) -> None:
    parts = [
        StoredPart(StateKey("j", "m", f"{kind}{number}", kind, 0, size), f"t{width}", width)
        for number, (kind, size, width) in enumerate(drawn)
    ]
    once, twice = lay_out(parts), lay_out(parts + parts)
    assert once == twice
    ends = 0
    for part, offset in zip(once.parts, once.offsets, strict=True):
        assert offset >= ends and offset % part.element_bytes == 0
        ends = offset + part.bytes
    assert once.bytes == ends


def test_one_name_for_two_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="as its replica is"):
        lay_out([StoredPart(key(0, 4), "float32", 4), StoredPart(key(0, 4), "bfloat16", 2)])


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 30)))
def test_merged_copies_move_the_same_bytes(places: dict[int, int]) -> None:
    runs = merge_runs({to: (source, 1) for to, source in places.items()})
    assert {to + n: source + n for to, source, length in runs for n in range(length)} == places


candidates = st.lists(
    st.builds(
        EvictionCandidate,
        st.uuids().map(str),
        st.integers(1, 100),
        st.floats(0, 10),
        st.none() | st.integers(0, 3),
    )
)


@given(candidates, st.integers(-5, 300))
def test_victims_make_the_room_and_none_of_them_is_needless(
    found: list[EvictionCandidate], needed: int
) -> None:
    sizes = {candidate.name: candidate.bytes for candidate in found}
    chosen = choose_victims(found, needed)
    if chosen is None:
        assert sum(sizes.values()) < needed
        return
    room = sum(sizes[name] for name in chosen)
    assert room >= needed
    assert all(room - sizes[name] < needed for name in chosen)


def test_what_runs_soonest_leaves_last() -> None:
    soon, later = EvictionCandidate("soon", 10, 0.0, 0), EvictionCandidate("later", 10, 9.0, 1)
    unknown = EvictionCandidate("unknown", 10, 9.5)
    assert choose_victims([soon, later, unknown], 10) == ["unknown"]
    assert choose_victims([soon, later], 10) == ["later"]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.integers(0, 50),
            st.booleans(),
            st.sets(st.sampled_from(["base", "other"])),
        ),
        max_size=8,
    ),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_whatever_is_admitted_can_be_brought_up_from_disk(
    asked: list[tuple[int, int, bool, set[str]]], host: int, disk: int
) -> None:
    budgets = StateBudgets(40, host, disk)
    images, kept = dict[str, ImageSize](), list[DeploymentNeeds]()
    for number, (device, size, warm, shares) in enumerate(asked):
        needs = DeploymentNeeds(device, (*sorted(shares), str(number)))
        known = {name: images.get(name, ImageSize(20, warm=False)) for name in shares}
        grown = images | {n: ImageSize(i.bytes, i.warm or warm) for n, i in known.items()}
        grown[str(number)] = ImageSize(size, warm)
        if explain_refusal(budgets, grown, kept, needs) is None:
            images = grown
            kept.append(needs)
    reserved = sum(image.bytes for image in images.values() if image.warm)
    spilled = sum(image.bytes for image in images.values() if not image.warm)
    assert spilled <= disk and reserved <= host
    for needs in kept:
        cold = sum(images[name].bytes for name in needs.images if not images[name].warm)
        assert needs.device_bytes <= 40 and reserved + cold <= host
