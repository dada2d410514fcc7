"""Long trajectories get the own instances, and those that end in time elsewhere leave them."""

from dataclasses import replace
from typing import Any

import pytest
from fleet_driver import FleetDriver, dispatches, turn_spec
from hypothesis import given
from hypothesis import strategies as st

from slackwater.control.rollout.commands import AbortTurn, DispatchTurn
from slackwater.control.rollout.events import TurnSubmitted
from slackwater.model.ids import InstanceId, TenantId
from slackwater.model.instance import InstanceKind
from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.long_tail import TimeLeft, pair_exchanges
from slackwater.policy.rollout.step_time import StepTime

LAW = StepTime(0.01, 0.001, 0.0)


def own(in_flight: int = 0, name: str = "own") -> InstanceLoad:
    return load(name, InstanceKind.DEDICATED, in_flight)


def lent(in_flight: int = 0, slowness: float = 2.0) -> InstanceLoad:
    return replace(load("lent", InstanceKind.BORROWED, in_flight), slowness=slowness)


def load(name: str, kind: InstanceKind, in_flight: int) -> InstanceLoad:
    made = InstanceLoad(InstanceId(name), kind, 16, 100_000, 40_000, accepting=True)
    return replace(made, in_flight=in_flight)


def spare(
    left_s: float, home: InstanceLoad | None, *others: InstanceLoad, longest_s: float = 200.0
) -> str | None:
    """The name of the lent instance where the trajectory should run."""
    eligible = sorted([*others, *([] if home is None else [home])], key=lambda one: not one.owned)
    left = TimeLeft(left_s, longest_s, LAW)
    found = left.find_spare(100, home, eligible, lambda load: load.in_flight < load.max_running)
    return None if found is None else found.instance


def test_a_trajectory_that_ends_in_time_on_a_lent_instance_leaves_a_full_own_one() -> None:
    assert spare(50.0, own(15), lent()) == "lent"
    assert spare(50.0, own(15), lent(16)) is None, "there is no room"
    assert spare(50.0, own(15), lent(slowness=9.0)) is None, "it would end too late there"
    assert spare(150.0, own(15), lent()) is None, "it is one of the longest"
    assert spare(5.0, own(15), lent()) is None, "it ends before a prefill pays"
    assert spare(50.0, own(1), lent()) is None, "hardly any turn runs beside it"


def test_a_trajectory_on_a_lent_instance_stays_if_it_ends_in_time_there() -> None:
    assert spare(50.0, lent(), own()) == "lent"
    assert spare(150.0, lent(), own()) is None


def test_a_new_trajectory_starts_on_a_lent_instance_that_has_no_more_turns_than_own_ones() -> None:
    assert spare(50.0, None, own(4), lent(3)) == "lent"
    assert spare(50.0, None, own(4), lent(6)) is None
    assert spare(50.0, None, own(4), own(2, "second"), lent(3)) is None


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.integers(0, 16))
def test_own_instances_alone_and_lent_ones_alone_are_left_to_the_routing(
    left_s: float, longest_s: float, in_flight: int
) -> None:
    assert spare(left_s, own(in_flight), own(0, "second"), longest_s=longest_s) is None
    assert spare(left_s, lent(in_flight), longest_s=longest_s) is None


_TIMED = st.lists(st.tuples(st.floats(0, 1e4), st.integers()), max_size=12)


@given(_TIMED, _TIMED)
def test_exchanged_trajectories_differ_much_and_none_is_exchanged_twice(
    long: list[tuple[float, int]], short: list[tuple[float, int]]
) -> None:
    longs = [(left_s, ("long", place)) for place, (left_s, _) in enumerate(long)]
    shorts = [(left_s, ("short", place)) for place, (left_s, _) in enumerate(short)]
    pairs = pair_exchanges(longs, shorts)
    left_s = {name: seconds for seconds, name in [*longs, *shorts]}
    assert all(left_s[one] >= 1.5 * left_s[other] for one, other in pairs)
    assert len({name for pair in pairs for name in pair}) == 2 * len(pairs)


class Epochs:
    """A fleet with one own instance of two slots, which has run one short and one long prompt."""

    def __init__(self) -> None:
        self.driver = FleetDriver()
        self.driver.join("own", kind=InstanceKind.DEDICATED, max_running=2)
        for name, prompt, lasted_s in (("s", 1, 20.0), ("l", 2, 600.0)):
            (sent,) = self.submit(f"{name}-known", prompt)
            self.driver.now_s += lasted_s
            self.driver.tokens("own", sent.attempt, [7])
            self.driver.end("own", sent.attempt, 1)

    def submit(self, name: str, prompt: int, **fields: Any) -> list[DispatchTurn]:
        spec = turn_spec(name, prompt=[prompt] * 8, **fields)
        return dispatches(self.driver.happen(TurnSubmitted(self.driver.now_s, spec)))


def test_long_trajectories_take_the_places_of_short_ones_that_have_just_begun() -> None:
    epochs = Epochs()
    driver = epochs.driver
    assert [each.turn for name in ("s1", "s2") for each in epochs.submit(name, 1)] == ["s1", "s2"]
    assert not epochs.submit("long", 2)
    assert not dispatches(driver.watch(1.0)), "without lent instances nothing is exchanged"
    driver.join("lent", kind=InstanceKind.BORROWED, max_running=1)
    commands = driver.watch(1.0)
    aborted = [each for each in commands if isinstance(each, AbortTurn)]
    assert [each.instance for each in aborted].count(InstanceId("own")) == 1
    assert ("own", "long") in {(each.instance, each.turn) for each in dispatches(commands)}
    assert not [each for each in driver.watch(1.0) if isinstance(each, AbortTurn)], "once is enough"


@pytest.mark.parametrize("owner", ["one", "another"])
def test_only_turns_of_one_owner_are_exchanged(owner: str) -> None:
    epochs = Epochs()
    driver = epochs.driver
    for name in ("s1", "s2"):
        epochs.submit(name, 1, owner=TenantId("one"))
    epochs.submit("long", 2, owner=TenantId(owner))
    driver.join("lent", kind=InstanceKind.BORROWED, max_running=1)
    on_own = {each.turn for each in dispatches(driver.watch(1.0)) if each.instance == "own"}
    assert ("long" in on_own) == (owner == "one")
