"""The pure policies: routing, balancing, and what they learn from."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.model.ids import InstanceId, JobId, TrajectoryId, TurnId
from slackwater.model.instance import InstanceKind
from slackwater.policy.rollout.balancing import EngineKnowledge, EvenSteps, FillIdle
from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.plateau import ThroughputProfile
from slackwater.policy.rollout.response_lengths import ResponseLengths
from slackwater.policy.rollout.routing import (
    CacheAffine,
    Destination,
    LeastLoaded,
    PinnedTrajectory,
    RoundRobinRouting,
    ShortestQueue,
    TurnNeed,
)
from slackwater.policy.rollout.start_order import PromptKey, StartOrder, make_prompt_key
from slackwater.policy.rollout.step_time import Slowness, StepTime, StepTimeFit
from slackwater.policy.rollout.warm_routing import KeepWarm
from slackwater.policy.rollout.working_set import ContextGrowth, Tokens, empty_working_set


def load(name: str, in_flight: int = 0, **fields: Any) -> InstanceLoad:
    made = InstanceLoad(InstanceId(name), InstanceKind.SPOT, 4, 1000, 2000, accepting=True)
    return replace(made, in_flight=in_flight, **fields)


def need(affine: str | None = None, context: int = 10, *, resident: bool = False) -> TurnNeed:
    home = None if affine is None else InstanceId(affine)
    turn, trajectory = TurnId("t"), TrajectoryId("c")
    never_grows = ContextGrowth(1 << 20)
    never_grows.record_end(context)
    return TurnNeed(turn, trajectory, context, home, resident, never_grows)


def holding(tokens: int) -> Tokens:
    """What a trajectory that never grows is expected to hold."""
    expected = empty_working_set()
    expected[0] = tokens
    return expected


def homes(name: str, in_flight: int, residents: int, tokens: int) -> InstanceLoad:
    """An instance with a working set."""
    expected = holding(tokens)
    return load(name, in_flight, residents=residents, expected_tokens=expected)


def test_affinity_wins_while_home_has_room_and_the_least_loaded_takes_over() -> None:
    policy = CacheAffine()
    assert policy.place(need("b"), [load("a"), load("b", 3)]).instance == "b"
    assert policy.place(need("b"), [load("a", 1), load("b", 4)]).instance == "a"


def test_own_instances_come_before_lent_ones() -> None:
    own = load("z", 3, kind=InstanceKind.DEDICATED)
    assert LeastLoaded().place(need(), [load("a"), own]).instance == "z"


def test_nobody_with_room_means_wait() -> None:
    assert LeastLoaded().place(need(), [load("a", 4)]) == Destination()
    assert (
        LeastLoaded().place(need(context=995), [load("a", 1, kv_load_tokens=50)]) == Destination()
    )


def test_delayed_dispatch_lets_a_few_wait_at_an_instance_and_no_more() -> None:
    policy = ShortestQueue(pending_limit=2)
    assert policy.place(need(), [load("a", 5), load("b", 6)]).instance == "a"
    assert policy.place(need(), [load("a", 6), load("b", 6)]) == Destination()


def test_a_pinned_trajectory_waits_for_its_home_alone() -> None:
    placed = PinnedTrajectory().place(need("b"), [load("a"), load("b", 4)])
    assert (placed.instance, placed.bound_to) == (None, "b")


def test_a_trajectory_of_a_working_set_waits_for_its_home() -> None:
    busy, idle = homes("b", 4, 6, 900), homes("a", 1, 1, 100)
    waits = KeepWarm().place(need("b", 100, resident=True), [idle, busy])
    assert (waits.instance, waits.bound_to) == (None, "b")
    assert KeepWarm().place(need("b", 100), [idle, busy]).instance == "a"


def test_a_trajectory_starts_only_where_the_working_set_leaves_room_for_it() -> None:
    policy, full = KeepWarm(), homes("a", 1, 3, 950)
    assert policy.place(need(context=100), [full]) == Destination()
    assert policy.place(need(context=100), [full, homes("b", 2, 3, 500)]).instance == "b"
    alone = need(context=100)
    assert policy.place(alone, [load("a", kv_tokens=50, expected_tokens=holding(0))]).instance


def test_a_home_that_decodes_much_more_slowly_is_left_for_one_with_room() -> None:
    policy, warm = KeepWarm(), need("b", 100, resident=True)
    slow = load("b", 1, slowness=3.0)
    assert policy.place(warm, [load("a", 1), slow]).instance == "a"
    assert policy.place(warm, [homes("a", 3, 3, 950), slow]).instance == "b"  # no cache for it
    assert policy.place(warm, [load("a", 1), load("b", 1, slowness=1.4)]).instance == "b"


def test_contexts_are_expected_to_grow_as_those_before_them_did() -> None:
    law = ContextGrowth(3200)
    for _ in range(40):
        for reached in range(200, 1001, 100):
            law.record_growth(reached - 100, reached)
        law.record_end(1000)
    young, old = law.forecast_tokens(100)[0], law.forecast_tokens(1000)[0]
    assert young.max() == pytest.approx(1000, rel=0.15), "it will have grown to about 1000"
    assert old.argmax() == 0, "it is about to end"
    assert (law.forecast_tokens(100, alive=0.5)[0] <= young).all()


def test_a_trajectory_is_taken_to_have_ended_after_longer_than_others_pause() -> None:
    assert not ContextGrowth(3200).usually_returns, "nothing is known yet"
    law = ContextGrowth(3200)
    for number in range(200):
        law.record_return(0.1 if number % 10 else 5.0)
    for _ in range(20):
        law.record_end(1000)
    assert law.usually_returns
    pauses_s = [law.estimate_pause_s(alive, 60.0) for alive in (0.75, 0.5, 0.1)]
    assert pauses_s == sorted(pauses_s) and pauses_s[-1] == 5.0
    assert law.estimate_pause_s(0.1, 2.0) == 2.0


LOADS = st.lists(
    st.builds(
        lambda number, in_flight, waiting, kv, homed, accepting: load(
            f"i{number}",
            in_flight,
            waiting=min(waiting, in_flight),
            kv_load_tokens=kv,
            residents=homed // 100,
            expected_tokens=holding(homed),
            accepting=accepting,
        ),
        st.integers(0, 50),
        st.integers(0, 6),
        st.integers(0, 6),
        st.integers(0, 1200),
        st.integers(0, 1200),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda made: made.instance,
)


@pytest.mark.parametrize(
    "policy",
    [
        RoundRobinRouting(),
        ShortestQueue(),
        PinnedTrajectory(),
        LeastLoaded(),
        CacheAffine(),
        KeepWarm(),
    ],
    ids=lambda policy: type(policy).__name__,
)
@settings(max_examples=40, deadline=None)
@given(loads=LOADS, context=st.integers(1, 900), home=st.integers(0, 50))
def test_a_turn_is_only_placed_where_it_may_go_and_always_the_same_way(
    policy: CacheAffine, loads: list[InstanceLoad], context: int, home: int
) -> None:
    asked = need(f"i{home}", context, resident=bool(context % 2))
    placed = policy.place(asked, loads)
    assert placed == policy.place(asked, loads)
    if placed.instance is not None:
        (chosen,) = [made for made in loads if made.instance == placed.instance]
        assert chosen.accepting
        assert policy.can_take(asked, chosen)


@pytest.mark.parametrize("policy", [FillIdle(), EvenSteps()], ids=lambda p: type(p).__name__)
@settings(max_examples=40, deadline=None)
@given(loads=LOADS, plateau=st.none() | st.integers(1, 6))
def test_moves_go_from_instances_that_have_turns_to_others_with_room_for_them(
    policy: FillIdle, loads: list[InstanceLoad], plateau: int | None
) -> None:
    known = EngineKnowledge(plateau, StepTime(0.01, 1e-4, 1e-6))
    taken: dict[str, int] = {}
    given_: dict[str, int] = {}
    for move in policy.plan_moves(loads, known):
        assert move.source != move.target
        assert move.count > 0
        taken[move.source] = taken.get(move.source, 0) + move.count
        given_[move.target] = given_.get(move.target, 0) + move.count
    by_name = {made.instance: made for made in loads}
    for name, count in taken.items():
        assert count <= by_name[InstanceId(name)].in_flight
    for name, count in given_.items():
        target = by_name[InstanceId(name)]
        assert target.accepting
        assert target.in_flight + count <= target.max_running


def test_pending_turns_go_to_an_instance_without_any_until_it_is_full() -> None:
    moves = FillIdle().plan_moves([load("a", 7), load("b", 2)], EngineKnowledge())
    assert [(m.source, m.target, m.count, m.running) for m in moves] == [("a", "b", 2, False)]


def test_running_turns_move_only_beyond_the_plateau_and_only_to_an_idle_instance() -> None:
    busy, idle = load("a", 4), load("b")
    assert FillIdle().plan_moves([busy, idle], EngineKnowledge(plateau=None)) == ()
    (move,) = FillIdle().plan_moves([busy, idle], EngineKnowledge(plateau=3))
    assert (move.source, move.target, move.count) == ("a", "b", 1)
    assert list(FillIdle().plan_moves([busy, load("b", 1)], EngineKnowledge(plateau=3))) == []


def test_turns_are_not_moved_to_an_instance_whose_memory_was_taken_back() -> None:
    full, bare = load("a", 4, waiting=3), load("b", kv_tokens=0)
    assert list(EvenSteps().plan_moves([full, bare], EngineKnowledge(None, None))) == []
    (move,) = EvenSteps().plan_moves([full, bare, load("c")], EngineKnowledge(None, None))
    assert move.target == "c"


def test_even_steps_moves_half_the_difference_and_leaves_small_ones_alone() -> None:
    known = EngineKnowledge(None, StepTime(0.01, 0.001, 1e-5))
    heavy, light = load("a", 4, kv_load_tokens=800), load("b", 0)
    (move,) = EvenSteps().plan_moves([heavy, light], known)
    assert (move.source, move.target, move.count) == ("a", "b", 2)
    nearly = load("b", 3, kv_load_tokens=700)
    assert list(EvenSteps().plan_moves([heavy, nearly], known)) == []


@settings(max_examples=15, deadline=None)
@given(
    base=st.floats(1e-3, 5e-2),
    per_turn=st.floats(0, 1e-3),
    per_token=st.floats(0, 1e-7),
    seed=st.integers(0, 1000),
)
def test_step_times_are_learned_from_noisy_reports(
    base: float, per_turn: float, per_token: float, seed: int
) -> None:
    rng, fit = np.random.default_rng(seed), StepTimeFit()
    truth = StepTime(base, per_turn, per_token)
    for _ in range(300):
        batch, context = int(rng.integers(1, 200)), int(rng.integers(0, 600_000))
        prefilled = float(rng.integers(0, 3) * 50)
        step_s = truth.step_s(batch, context) + 2e-5 * prefilled
        fit.observe(batch, context, step_s * rng.normal(1, 0.02), prefilled)
    model = fit.model
    assert model is not None
    assert min(model.base_s, model.per_turn_s, model.per_token_s) >= 0
    for batch, context in ((1, 1000), (100, 300_000), (200, 600_000)):
        assert model.step_s(batch, context) == pytest.approx(truth.step_s(batch, context), rel=0.15)


def test_the_plateau_is_the_smallest_batch_with_nearly_the_best_rate() -> None:
    profile = ThroughputProfile()
    assert profile.plateau() is None
    for batch in range(1, 257):
        profile.observe(batch, min(batch, 40) * 10.0)
    plateau = profile.plateau()
    assert plateau is not None
    assert 32 <= plateau <= 64


def test_the_rest_of_a_turn_is_drawn_from_the_lengths_above_what_it_has() -> None:
    law = ResponseLengths()
    for tokens in range(1, 1001):
        law.observe(tokens)
    left = law.sample_remaining(np.full(500, 600.0))
    assert left.min() > 0
    assert left.max() <= 400
    assert left.mean() == pytest.approx(200, rel=0.05)


def test_a_turn_longer_than_any_that_ended_is_expected_to_go_on_as_long_again() -> None:
    law = ResponseLengths()
    for _ in range(1000):
        law.observe(10)
    assert law.sample_remaining(np.full(200, 1000.0)).mean() == pytest.approx(1000, rel=0.05)


def test_a_slow_instance_gives_turns_away_and_gets_fewer_new_ones() -> None:
    law = EngineKnowledge(None, StepTime(0.01, 0.001, 0.0))
    even = [load("a", 20, max_running=64), load("b", 20, max_running=64)]
    assert EvenSteps().plan_moves(even, law) == []
    uneven = [load("a", 20, max_running=64), load("b", 20, max_running=64, slowness=3.0)]
    (move,) = EvenSteps().plan_moves(uneven, law)
    assert (move.source, move.target) == ("b", "a")
    chosen = KeepWarm().place(need(), [load("a", 2), load("b", 1, slowness=3.0)])
    assert chosen.instance == "a"


def test_slowness_is_learned_and_small_differences_count_as_none() -> None:
    plain, slow = Slowness(), Slowness()
    rng = np.random.default_rng(0)
    for noise in np.exp(rng.normal(0.0, 0.1, 50)):
        plain.observe(0.02 * noise, 0.02)
        slow.observe(0.06 * noise, 0.02)
    assert plain.factor == 1.0
    assert slow.factor == pytest.approx(3.0, rel=0.15)


def test_trajectories_that_last_much_longer_than_most_start_first() -> None:
    order, job = StartOrder(), JobId("job")
    short, usual, long, unknown = (make_prompt_key(job, (token,)) for token in range(4))
    for prompt, lasted_s in ((short, 60.0), (usual, 100.0), (long, 260.0), (long, 90.0)):
        order.record(prompt, lasted_s)
    waiting = [(prompt, 0.0) for prompt in (short, usual, usual, unknown, unknown, long)]
    assert order.order(waiting) == [3, 5, 0, 1, 2, 4]
    assert order.order([*waiting, (short, -261.0)])[0] == 6, "it has waited long enough"
    assert make_prompt_key(JobId("other"), (0,)) != short


def _plain_order(
    lasted: dict[PromptKey, float], waiting: list[tuple[PromptKey, float]]
) -> list[int]:
    """The rule of `StartOrder`, one waiting trajectory after the other."""
    known_s = sorted(lasted[prompt] for prompt, _ in waiting if prompt in lasted)
    if not known_s:
        return list(range(len(waiting)))
    median_s = known_s[(len(known_s) - 1) // 2]
    ranks: list[tuple[float, int]] = []
    for index, (prompt, since_s) in enumerate(waiting):
        is_first = prompt not in [earlier for earlier, _ in waiting[:index]]
        ahead_s = lasted.get(prompt, known_s[-1] if is_first else 0.0)
        is_ahead = prompt not in lasted or ahead_s > 2 * median_s
        ranks.append((since_s - (ahead_s if is_ahead else 0.0), index))
    return [index for _, index in sorted(ranks)]


_prompts = st.integers(0, 8).map(PromptKey)
_seconds = st.floats(0.0, 100.0)


@given(st.dictionaries(_prompts, _seconds), st.lists(st.tuples(_prompts, _seconds), max_size=30))
def test_the_order_of_many_is_that_of_each(
    lasted: dict[PromptKey, float], waiting: list[tuple[PromptKey, float]]
) -> None:
    order = StartOrder()
    for prompt, lasted_s in lasted.items():
        order.record(prompt, lasted_s)
    assert order.order(waiting) == _plain_order(lasted, waiting)
