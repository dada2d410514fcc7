"""Nothing is lent while the service breaks its promise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.admission import RolloutGrant
from slackwater.policy.serving.arbiter import Arbiter, DeviceUse
from slackwater.policy.serving.modes import MODES, find_mode
from slackwater.policy.serving.overload import Overload
from slackwater.policy.serving.prompt_queue import STRETCH
from slackwater.policy.serving.slack import QueuedPrompt, RolloutState, ServingState
from slackwater.policy.serving.step_cost import StepCost

SLO = ServingSlo(0.5, 0.15)
COST = StepCost.of((1, 64, 512, 4096), (0.008, 0.009, 0.02, 0.16), 1e-8, 1e-9)
ROLLOUT = RolloutState(decoding=8, context=8000, prompt_tokens=3000)
STOPPING = sorted(name for name, mode in MODES.items() if mode.stops)


def arbiter_of(mode: str) -> Arbiter:
    arbiter = Arbiter(find_mode(mode), SLO, COST, COST, capacity=1000)
    arbiter.begin_step(100)
    return arbiter


answers = st.lists(st.tuples(st.floats(0.0, 4.0), st.booleans(), st.booleans()), max_size=120)


@given(answers, st.floats(0.0, 40.0))
def test_a_promise_is_broken_while_more_than_its_share_of_the_last_window_missed(
    story: list[tuple[float, bool, bool]], later_s: float
) -> None:
    overload, now_s = Overload(0.9, window_s=10.0), 0.0
    came: list[float] = []
    missed: list[float] = []
    for gap_s, kept, kept_after in story:
        now_s += gap_s
        came.append(now_s)
        overload.record_answer(now_s, kept=kept)
        if not kept or not kept_after:
            missed.append(now_s)
        if kept and not kept_after:
            overload.record_miss(now_s)
    requests = sum(at_s > now_s - 10.0 for at_s in came)
    misses = sum(at_s > now_s - 10.0 for at_s in missed)
    assert overload.is_broken(now_s) == (misses >= 2 and misses > (1.0 - 0.9) * requests)
    recent = sum(at_s > now_s + later_s - 10.0 for at_s in missed)
    if overload.is_broken(now_s):
        assert overload.is_broken(now_s + later_s) == (recent >= 2)


def test_one_late_request_says_nothing() -> None:
    overload = Overload(0.99)
    overload.record_answer(1.0, kept=False)
    assert not overload.is_broken(1.0)
    overload.record_answer(2.0, kept=False)
    assert overload.is_broken(2.0)
    assert not overload.is_broken(31.5)


arrivals = st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 16_000)), max_size=80)


@given(arrivals)
def test_nothing_is_lent_while_stretched_prompts_would_break_the_promise(
    story: list[tuple[float, int]],
) -> None:
    ours, dual = arbiter_of("foresight"), arbiter_of("dual")
    now_s = ends_s = 0.0
    waits: list[tuple[float, float]] = []
    for gap_s, tokens in story:
        now_s += gap_s
        ends_s = max(ends_s, now_s) + STRETCH * COST.prompt_s(tokens, 0, 512)
        waits.append((now_s, ends_s - now_s))
        for arbiter in (ours, dual):
            arbiter.record_arrival(now_s, tokens)
        recent = [wait_s for at_s, wait_s in waits if at_s > now_s - 30.0]
        late = sum(wait_s > SLO.ttft_s for wait_s in recent)
        broken = late >= 2 and late > (1.0 - SLO.share) * len(recent)
        step = ours.next_step(now_s, ServingState(), ROLLOUT)
        assert isinstance(step, RolloutGrant) != broken
        assert ours.stopped == broken and (ours.lent == 0) == broken
        assert dual.keeps_slo(now_s), "dual looks at what has happened only"
    assert ours.keeps_slo(now_s + 31.0)


@given(
    st.sampled_from(STOPPING),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 1.5)), max_size=60),
)
def test_a_service_that_breaks_its_promise_lends_neither_time_nor_memory(
    mode: str, story: list[tuple[float, float]]
) -> None:
    arbiter, now_s = arbiter_of(mode), 0.0
    lent, serving = arbiter.lent, ServingState(decoding=4, context=400)
    for gap_s, ttft_s in story:
        now_s += gap_s
        arbiter.record_first_token(now_s, ttft_s)
        serving.oldest_token_s, serving.mean_due_s = now_s, now_s + 0.15
        step = arbiter.next_step(now_s, serving, ROLLOUT)
        if arbiter.keeps_slo(now_s):
            assert arbiter.lent == lent
        else:
            assert step is DeviceUse.SERVE
            assert arbiter.lent == 0
    step = arbiter.next_step(now_s + 31.0, ServingState(), ROLLOUT)
    assert isinstance(step, RolloutGrant), "what is over is over"
    assert arbiter.lent == lent


def test_slow_tokens_after_a_first_one_in_time_break_the_promise_too() -> None:
    arbiter = arbiter_of("foresight")
    for _ in range(3):
        arbiter.record_first_token(1.0, 0.1)
        arbiter.record_end(1.0, 0.1, 0.2)
    assert not arbiter.keeps_slo(1.0)


def test_a_queue_that_misses_its_promise_as_a_whole_stops_a_gate_that_sees_each_prompt_alone() -> (
    None
):
    """Twenty prompts of 20 ms each: the first ten make it, and each would alone."""
    queued = [QueuedPrompt(9.9, 512) for _ in range(40)]
    arbiter = arbiter_of("dual")
    assert arbiter.next_step(10.0, ServingState(queued), ROLLOUT) is DeviceUse.SERVE
    assert isinstance(arbiter.next_step(10.0, ServingState(queued[:3]), ROLLOUT), RolloutGrant)


@pytest.mark.parametrize("mode", sorted(set(MODES) - set(STOPPING)))
def test_the_ways_it_is_compared_with_go_on(mode: str) -> None:
    arbiter = arbiter_of(mode)
    lent = arbiter.lent
    for _ in range(10):
        arbiter.record_first_token(1.0, 3.0)
    arbiter.next_step(1.0, ServingState(), ROLLOUT)
    assert arbiter.keeps_slo(1.0)
    assert arbiter.lent == lent
