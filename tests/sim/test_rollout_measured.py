"""A step simulated with measured costs, and costs learned from a record of a live run."""

import msgspec
import numpy as np
import pytest

from benchmarks.engine.profile import Step, fit, steps_of
from benchmarks.rollout.measured_cost import MeasuredCost
from benchmarks.rollout.one_step import simulate_step
from slackwater.control.record import encode_message
from slackwater.control.rollout.commands import AbortTurn, DispatchTurn
from slackwater.control.rollout.events import InstanceLost, TokensArrived, TurnEnded, TurnSubmitted
from slackwater.model.errors import ConfigError, RefusedError
from slackwater.model.ids import InstanceId, JobId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import AttemptId, FinishReason, TurnSpec

FLAT = MeasuredCost(((1, 0.01), (64, 0.01)), 0.0, 0.0, 1 << 20)


def turn(name: str, tokens: int) -> TurnSpec:
    job = JobId("job")
    return TurnSpec(TurnId(name), TrajectoryId(name), job, (1, 2, 3), Sampling(tokens), "v1")


def test_step_times_lie_on_straight_lines_between_the_sizes_measured() -> None:
    cost = MeasuredCost(((1, 1.0), (3, 2.0), (5, 6.0)), 0.0, 0.0, 100)
    assert [cost.step_s(batch) for batch in (1, 2, 3, 4, 5, 6)] == [1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    with pytest.raises(ConfigError, match="growing"):
        MeasuredCost(((3, 1.0), (1, 2.0)), 0.0, 0.0, 100)


def test_a_step_lasts_as_long_as_its_longest_turn_when_batches_cost_nothing() -> None:
    specs = [turn("short", 10), turn("long", 200)]
    took_s = simulate_step(specs, FLAT, ["a", "b"], max_running=8)
    assert took_s == pytest.approx(2.0, rel=0.02)


def test_a_kill_costs_little_when_turns_go_on_from_their_tokens() -> None:
    specs = [turn(f"t{number}", 200) for number in range(8)]
    took_s = simulate_step(specs, FLAT, ["a", "b"], max_running=8, kill=(1.0, "a"))
    assert took_s == pytest.approx(2.0, rel=0.02)


def test_an_engine_left_alone_on_its_machine_is_faster() -> None:
    specs = [turn(f"t{number}", 200) for number in range(8)]
    took_s = simulate_step(
        specs, FLAT, ["a", "b"], max_running=8, kill=(1.0, "a"), alone_slowdown=0.5
    )
    assert took_s == pytest.approx(1.5, rel=0.02)


def test_costs_are_found_again_in_the_steps_they_made() -> None:
    rng = np.random.default_rng(0)
    steps: list[Step] = []
    for _ in range(2000):
        batch, prefilled = int(rng.integers(1, 60)), int(rng.integers(0, 3)) * 50
        context = batch * int(rng.integers(20, 500))
        alone = bool(rng.integers(2))
        took_s = 0.002 + 1e-4 * batch + 1e-7 * context + 2e-5 * prefilled
        took_s *= (0.7 if alone else 1.0) * rng.uniform(0.97, 1.03)
        steps.append(Step(batch, context, prefilled, took_s, alone))
    profile = fit(steps, 1000)
    assert profile.cost.step_s(10) == pytest.approx(0.003, rel=0.05)
    assert profile.cost.step_s(50) == pytest.approx(0.007, rel=0.05)
    assert profile.cost.context_s == pytest.approx(1e-7, rel=0.1)
    assert profile.cost.prefill_token_s == pytest.approx(2e-5, rel=0.05)
    assert profile.alone_slowdown == pytest.approx(0.7, rel=0.05)
    with pytest.raises(RefusedError, match="steps"):
        fit(steps[:10], 1000)


def line(event: object, *commands: object) -> bytes:
    entry = {
        "event": encode_message(event),
        "commands": [encode_message(command) for command in commands],
    }
    return msgspec.json.encode(entry)


def dispatch(attempt: int, prompt: int, instance: str = "a") -> DispatchTurn:
    name = TurnId(f"t{attempt}")
    spec = Sampling(100)
    return DispatchTurn(
        InstanceId(instance), AttemptId(attempt), name, "v1", (1,) * prompt, (), spec
    )


def tokens(now_s: float, attempts: list[int], instance: str = "a") -> TokensArrived:
    count = len(attempts)
    return TokensArrived(now_s, InstanceId(instance), attempts, [5] * count, [-1.0] * count)


def ended(now_s: float, attempt: int) -> TurnEnded:
    reason = FinishReason.STOP
    return TurnEnded(now_s, InstanceId("a"), AttemptId(attempt), reason, 1, "v1")


def test_a_record_gives_every_step_its_batch_context_prefill_and_length() -> None:
    submitted = TurnSubmitted(1.0, turn("t", 5))
    lines = [
        line(submitted, dispatch(1, 10), dispatch(2, 20)),
        line(tokens(1.5, [1, 2])),
        line(tokens(1.6, [1, 2])),
        line(ended(1.6, 2)),
        line(tokens(1.8, [1])),
        line(ended(1.8, 1)),
        line(TurnSubmitted(5.0, turn("u", 5)), dispatch(3, 7)),  # idle in between
        line(tokens(5.25, [3])),
    ]
    found = [
        (step.batch, step.context_tokens, step.prefilled_tokens, round(step.took_s, 6))
        for step in steps_of(lines)
    ]
    assert found == [(2, 30, 30, 0.5), (2, 32, 0, 0.1), (1, 12, 0, 0.2), (1, 7, 7, 0.25)]


def test_aborted_turns_and_lost_instances_leave_the_books_of_the_profile() -> None:
    lines = [
        line(TurnSubmitted(0.0, turn("t", 5)), dispatch(1, 10), dispatch(2, 20)),
        line(InstanceLost(0.5, InstanceId("b"), "gone"), AbortTurn(InstanceId("a"), AttemptId(2))),
        line(tokens(1.0, [1, 2])),
        line(InstanceLost(2.0, InstanceId("a"), "gone")),
        line(tokens(3.0, [1])),
    ]
    assert [(step.batch, step.took_s) for step in steps_of(lines)] == [(1, 1.0)]
