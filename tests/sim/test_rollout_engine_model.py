"""The simulated engine's closed form is the step-by-step engine."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.model.ids import TrajectoryId
from slackwater.sim.rollout.engine_cost import H100, QWEN3_8B, QWEN3_32B, EngineCost
from slackwater.sim.rollout.simulated_engine import Request, SimulatedEngine

COST = EngineCost(QWEN3_8B, H100, 2)


def request(number: int, context: int, tokens: int) -> Request:
    return Request(number, TrajectoryId(f"c{number}"), context, tokens)


def step_by_step(lengths: list[int], context: int) -> list[float]:
    """Prefill all, then one decode step after the other."""
    now_s = sum(COST.prefill_s(context, context) for _ in lengths)
    made, ends = 0, [0.0] * len(lengths)
    while any(length > made for length in lengths):
        running = [length for length in lengths if length > made]
        held = sum(context + made for _ in running)
        now_s += COST.step_s(len(running)) + COST.context_s * held
        made += 1
        for index, length in enumerate(lengths):
            if length == made:
                ends[index] = now_s
    return ends


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12), context=st.integers(1, 4000))
def test_turns_end_when_a_step_by_step_engine_would_end_them(
    lengths: list[int], context: int
) -> None:
    engine = SimulatedEngine(COST, 64, 0.0)
    for number, length in enumerate(lengths):
        engine.add(request(number, context, length))
    ended: dict[int, float] = {}
    while engine.requests:
        at_s = engine.next_change_s()
        for done in engine.advance(at_s):
            ended[done.attempt] = at_s
    exact = step_by_step(lengths, context)
    for number, at_s in enumerate(exact):
        assert ended[number] == pytest.approx(at_s, rel=0.02, abs=0.02)


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.floats(0.001, 0.5), min_size=1, max_size=20))
def test_looking_more_often_changes_nothing(cuts: list[float]) -> None:
    often, once = (SimulatedEngine(COST, 8, 0.0) for _ in range(2))
    for engine in (often, once):
        for number in range(6):
            engine.add(request(number, 100 * number + 1, 2000))
    now_s = 0.0
    for cut_s in cuts:
        now_s += cut_s
        often.advance(now_s)
    once.advance(now_s)
    assert often.produced == pytest.approx(once.produced, rel=1e-6, abs=1e-6)


def test_a_full_cache_preempts_the_youngest_and_no_token_is_lost() -> None:
    cost = EngineCost(QWEN3_32B, H100, 2)
    engine = SimulatedEngine(cost, 256, 0.0)
    lengths = dict.fromkeys(range(120), 4000)  # 120 x 4200 tokens do not fit in 287 K
    for number, length in lengths.items():
        engine.add(request(number, 200, length))
    seen_waiting = 0
    done: list[Request] = []
    while engine.requests:
        at_s = engine.next_change_s()
        assert at_s < math.inf
        done += engine.advance(at_s)
        seen_waiting = max(seen_waiting, engine.waiting)
        assert engine.kv_used_tokens <= engine.kv_tokens * 1.01
    assert seen_waiting > 0
    assert sorted(r.attempt for r in done) == sorted(lengths)
    assert engine.produced == pytest.approx(sum(lengths.values()), rel=1e-3)


def test_a_returning_trajectory_prefills_only_what_is_new() -> None:
    engine = SimulatedEngine(COST, 8, 0.0)
    engine.add(request(1, 1000, 50))
    engine.advance(100.0)
    before = engine.prefilled
    again = Request(2, TrajectoryId("c1"), 1200, 10)
    engine.add(again)
    assert engine.prefilled - before == 150
    cold = SimulatedEngine(COST, 8, 0.0)
    cold.add(request(1, 1000, 50))
    cold.advance(100.0)
    cold.add(Request(2, TrajectoryId("c2"), 1200, 10))
    assert cold.prefilled == 2200
