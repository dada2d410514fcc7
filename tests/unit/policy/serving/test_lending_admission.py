"""When a rollout may have a serving device for a step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.errors import ConfigError
from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.admission import Foresight, RolloutGrant, SlackGate, rollout_step_s
from slackwater.policy.serving.arbiter import Arbiter, DeviceUse, NextStep
from slackwater.policy.serving.modes import MODES, find_mode
from slackwater.policy.serving.prompt_queue import STRETCH, PromptQueue
from slackwater.policy.serving.slack import (
    DeviceState,
    QueuedPrompt,
    RolloutState,
    ServingState,
    longest_wait_s,
    tpot_slack_s,
    ttft_slack_s,
)
from slackwater.policy.serving.step_cost import (
    Correction,
    StepCost,
    StepCostCurve,
    StepWork,
    fit_step_cost,
    step_work,
)

SLO = ServingSlo(0.5, 0.15)
COST = StepCost.of((1, 64, 512, 4096), (0.008, 0.009, 0.02, 0.16), 1e-8, 1e-9)
ROLLOUT = RolloutState(decoding=8, context=8000, prompt_tokens=3000)


def device(
    serving: ServingState, rollout: RolloutState = ROLLOUT, now_s: float = 10.0
) -> DeviceState:
    return DeviceState(now_s, SLO, serving, rollout, COST, COST, last_rollout_s=now_s)


def test_an_idle_device_is_lent_in_every_mode_that_lends() -> None:
    for mode in MODES.values():
        grant = mode.admission.grant(device(ServingState()))
        assert (grant is not None) == mode.lends


def test_the_ttft_slack_is_that_of_the_prompt_that_is_nearest_to_its_promise() -> None:
    state = device(ServingState([QueuedPrompt(9.9, 512), QueuedPrompt(9.7, 512)]))
    alone_s = COST.prompt_s(512, 0, 512)
    assert ttft_slack_s(state) == pytest.approx(9.7 + 0.5 - 10.0 - alone_s, rel=1e-3)


def test_the_tpot_slack_counts_the_step_that_is_to_come() -> None:
    state = device(ServingState(decoding=64, context=64_000, oldest_token_s=9.95))
    step_s = COST.step_s(StepWork(64, 64_000))
    assert tpot_slack_s(state) == pytest.approx(9.95 + 0.15 - 10.0 - step_s)


def test_each_gate_looks_at_its_own_promise_alone() -> None:
    late_prompt = ServingState([QueuedPrompt(9.45, 512)])
    late_token = ServingState(decoding=8, context=800, oldest_token_s=9.86)
    for name, serving, lends in (
        ("ttft", late_prompt, False),
        ("tpot", late_prompt, True),
        ("ttft", late_token, True),
        ("tpot", late_token, False),
        ("dual", late_prompt, False),
        ("dual", late_token, False),
        ("foresight", late_prompt, False),
        ("foresight", late_token, False),
    ):
        assert (find_mode(name).admission.grant(device(serving)) is not None) == lends, name


def test_ours_keeps_room_for_the_work_that_may_come() -> None:
    calm = device(ServingState(), replace(ROLLOUT, decoding=0, context=0))
    grant = Foresight(most_share=1.0, most_tokens=10_000).grant(calm)
    calm.recent_wait_s = 0.42
    less = Foresight(most_share=1.0, most_tokens=10_000).grant(calm)
    assert grant is not None and less is not None
    assert 0 < less.prompt_tokens < grant.prompt_tokens
    assert less.step_s <= SLO.ttft_s - 0.42


@given(st.floats(0.5, 4.0), st.floats(0.0, 0.6))
def test_a_fifth_of_a_step_with_prompts_is_for_them_up_to_a_tenth_of_the_promise(
    slowness: float, recent_wait_s: float
) -> None:
    state = device(ServingState(), replace(ROLLOUT, decoding=0, context=0))
    state.rollout_factor, state.recent_wait_s = slowness, recent_wait_s
    grant = Foresight().grant(state)
    room_s = max(SLO.ttft_s - recent_wait_s, 0.04 * SLO.ttft_s)
    one_s = rollout_step_s(state, 1)
    longest_s = min(max(0.04 * SLO.ttft_s, 1.25 * one_s), 0.1 * SLO.ttft_s, room_s)
    if longest_s > 1.1 * one_s:
        assert grant is not None
        assert 0.95 * longest_s <= grant.step_s <= longest_s


def test_the_pace_falls_only_once_less_than_half_of_the_memory_is_left() -> None:
    serving = ServingState(decoding=8, context=800, oldest_token_s=10.0, mean_due_s=11.0)

    def room_s(memory_left: float) -> float:
        """The longest rollout step that follows another one."""
        state = device(serving, replace(ROLLOUT, decoding=0, context=0, prompt_tokens=9000))
        state.served_last, state.memory_left = False, memory_left
        grant = Foresight(most_share=1.0, most_tokens=9000).grant(state)
        return grant.step_s if grant is not None else 0.0

    assert room_s(1.0) == room_s(0.5) > 0.0
    assert room_s(0.25) == pytest.approx(room_s(1.0) / 2, rel=0.05)
    assert room_s(0.0) == 0.0


def test_a_rollout_decodes_between_prompts_that_wait_for_less_than_others_did() -> None:
    queued = ServingState([QueuedPrompt(9.98, 512)], 4, 400, 10.0, 10.5)
    state = device(queued)
    wait_s = longest_wait_s(state)
    assert wait_s == pytest.approx(0.02 + COST.prompt_s(512, 0, 512), rel=0.01)
    step_s = rollout_step_s(state, 0)
    state.recent_wait_s = 2.01 * STRETCH * (wait_s + step_s)
    assert Foresight().grant(state) == RolloutGrant(0, step_s)
    state.recent_wait_s = 1.99 * STRETCH * (wait_s + step_s)
    assert Foresight().grant(state) is None, "a slow request would be slower"
    state.recent_wait_s, state.served_last = 1.0, False
    assert Foresight().grant(state) is None, "a step of the service comes first"
    state.served_last, queued.mean_due_s = True, 10.02
    assert Foresight().grant(state) is None, "a request that decodes is late"


def test_a_rollout_beside_urgent_prompts_has_a_step_a_second() -> None:
    """Without one for two seconds its turns would move."""
    arbiter = Arbiter(find_mode("foresight"), SLO, COST, COST, capacity=1000)
    arbiter.record_arrival(0.0, 8000)
    serving, now_s, steps = ServingState([QueuedPrompt(0.0, 8000)]), 0.0, 0
    while now_s < 10.0:
        serving.queued = [QueuedPrompt(now_s, 8000)]
        step = arbiter.next_step(now_s, serving, ROLLOUT)
        if isinstance(step, RolloutGrant):
            steps += 1
            assert step.prompt_tokens == 0
        now_s += step.step_s if isinstance(step, RolloutGrant) else COST.prompt.step_s(512)
    assert 8 <= steps <= 10


def test_urgent_prompts_run_without_the_decoding_requests_that_can_wait() -> None:
    serving = ServingState([QueuedPrompt(10.0, 2000)], 40, 40_000, 10.0, 12.0)

    def turn(mode: str, *, lending: bool = True, longer: int = 0) -> NextStep:
        arbiter = Arbiter(find_mode(mode), SLO, COST, COST, capacity=1000)
        if lending:
            arbiter.begin_loan()
        arbiter.record_arrival(9.0, 2000 + longer)
        return arbiter.next_step(10.0, serving, RolloutState())

    assert turn("foresight") is DeviceUse.PREFILL
    assert turn("foresight", longer=3000) is DeviceUse.SERVE, "others waited for much longer"
    assert turn("foresight", lending=False) is DeviceUse.SERVE, "alone it serves as it did"
    assert turn("dual") is DeviceUse.SERVE
    serving.mean_due_s = 10.0 + 1.5 * COST.prompt.step_s(512)
    assert turn("foresight") is DeviceUse.SERVE, "one would be late"
    serving.mean_due_s = 12.0
    serving.decoding = serving.context = 0
    assert turn("foresight") is DeviceUse.SERVE


def test_memory_bounds_that_do_not_rise_are_refused() -> None:
    with pytest.raises(ConfigError, match="ample_memory"):
        Foresight(tight_memory=0.6, ample_memory=0.5)


queues = st.lists(
    st.builds(QueuedPrompt, st.floats(9.0, 10.0), st.integers(1, 4000), st.integers(0, 4000)),
    max_size=6,
)
servings = st.builds(
    ServingState,
    queues,
    st.integers(0, 200),
    st.integers(0, 100_000),
    st.floats(9.7, 10.0),
    st.floats(9.8, 10.4),
)
rollouts = st.builds(
    RolloutState, st.integers(0, 200), st.integers(0, 100_000), st.integers(0, 9000)
)


@given(servings, rollouts, st.sampled_from(["dual", "foresight"]), st.floats(0.0, 0.6))
def test_a_step_that_is_granted_fits_both_slacks(
    serving: ServingState, rollout: RolloutState, name: str, recent_wait_s: float
) -> None:
    state = device(serving, rollout)
    state.recent_wait_s = recent_wait_s
    grant = find_mode(name).admission.grant(state) if rollout.busy else None
    if grant is not None:
        assert grant.step_s == rollout_step_s(state, grant.prompt_tokens)
        assert grant.step_s <= ttft_slack_s(state)
        assert grant.step_s <= tpot_slack_s(state)
        assert grant.prompt_tokens <= rollout.prompt_tokens
        assert grant.prompt_tokens > 0 or rollout.decoding > 0


@given(servings, rollouts, st.floats(0.0, 0.6))
def test_no_decoding_request_is_late_because_prompts_ran_alone(
    serving: ServingState, rollout: RolloutState, recent_wait_s: float
) -> None:
    arbiter = Arbiter(find_mode("foresight"), SLO, COST, COST, capacity=1000)
    arbiter.begin_loan()
    arbiter.record_arrival(10.0, int(recent_wait_s * 10_000))
    if arbiter.next_step(10.0, serving, rollout) is DeviceUse.PREFILL:
        assert serving.queued and serving.decoding
        first = serving.queued[0].context
        tokens = min(sum(prompt.tokens for prompt in serving.queued), 512)
        rest = max(512 - serving.decoding, 1)
        next_s = COST.batch_step_s(serving.decoding, serving.context, rest, first + 512)
        assert 10.0 + COST.batch_step_s(0, 0, tokens, first) + next_s <= serving.mean_due_s + 1e-9


@given(servings, rollouts)
def test_a_rollout_is_never_given_two_steps_in_a_row_by_a_gate_while_the_service_has_work(
    serving: ServingState, rollout: RolloutState
) -> None:
    state = device(serving, rollout)
    state.served_last = False
    if serving.busy:
        assert SlackGate().grant(state) is None


@given(servings, rollouts, st.sampled_from(sorted(MODES)))
def test_the_service_goes_on_whatever_the_mode(
    serving: ServingState, rollout: RolloutState, name: str
) -> None:
    arbiter = Arbiter(find_mode(name), SLO, COST, COST, capacity=1000)
    now_s, steps = 10.0, []
    for _ in range(40):
        step = arbiter.next_step(now_s, serving, rollout)
        steps.append(step)
        now_s += step.step_s if isinstance(step, RolloutGrant) else 0.0
        if step is DeviceUse.SERVE:
            break
    assert (DeviceUse.SERVE in steps) == serving.busy
    if not serving.busy and not (rollout.busy and MODES[name].lends):
        assert steps[0] is DeviceUse.REST


def test_a_prompt_costs_its_chunks_and_its_attention() -> None:
    two = COST.prompt_s(1024, 0, 512)
    assert two == pytest.approx(2 * COST.prompt.step_s(512) + 1024 * 512 * COST.prompt_pair_s)
    assert COST.prompt_s(1024, 5000, 512) > two


@given(
    st.floats(0.001, 0.3),
    st.integers(0, 600),
    st.integers(0, 90_000),
    st.integers(0, 9000),
    st.integers(0, 3000),
    st.sampled_from([0.0, 1e-9]),
)
def test_the_chunk_is_the_largest_that_fits(
    limit_s: float, decoding: int, context: int, before: int, most: int, pair_s: float
) -> None:
    cost = replace(COST, prompt_pair_s=pair_s)
    found = cost.chunk_within(limit_s, decoding, context, before, most)
    assert 0 <= found <= most
    if found:
        assert cost.batch_step_s(decoding, context, found, before) <= limit_s * (1 + 1e-9)
    if found < most:
        assert cost.batch_step_s(decoding, context, found + 1, before) > limit_s * (1 - 1e-9)


def test_costs_are_found_again_from_measured_steps() -> None:
    true = StepCost(
        StepCostCurve((8, 64, 512), (0.009, 0.012, 0.03)),
        StepCostCurve((1, 32), (0.005, 0.006)),
        1e-8,
        1e-9,
    )
    prompts = [step_work(0, 0, rows) for rows in true.prompt.rows]
    prompts += [step_work(0, 0, 512, 90_000)]
    decodes = [StepWork(1, 10.0), StepWork(32, 320.0), StepWork(1, 40_000.0)]
    found = fit_step_cost(
        [(work, true.step_s(work)) for work in prompts],
        [(work, true.step_s(work)) for work in decodes],
    )
    assert found.prompt.rows == true.prompt.rows
    assert found.prompt.seconds == pytest.approx(true.prompt.seconds, rel=0.02)
    assert found.decode.seconds == pytest.approx(true.decode.seconds, rel=0.02)
    assert found.pair_s == pytest.approx(true.pair_s, rel=0.02)
    assert found.prompt_pair_s == pytest.approx(true.prompt_pair_s, rel=0.02)


def test_a_correction_follows_a_device_that_became_slower() -> None:
    correction = Correction()
    for _ in range(200):
        correction.observe(0.01, 0.013)
    assert correction.mean == pytest.approx(1.3, abs=0.01)
    assert 1.3 <= correction.upper < 1.4


def test_a_rollout_that_once_took_very_long_is_tried_again_when_the_service_is_idle() -> None:
    arbiter = Arbiter(find_mode("foresight"), SLO, COST, COST, capacity=1000)
    for _ in range(20):
        arbiter.record_rollout_step(StepWork(8, 8000.0), 2.0)
    waiting = RolloutState(prompt_tokens=3000)
    steps = [arbiter.next_step(10.0, ServingState(), waiting) for _ in range(500)]
    assert steps[0] is DeviceUse.REST
    assert isinstance(steps[-1], RolloutGrant)


@given(
    st.lists(st.tuples(st.floats(0, 0.3), st.floats(0.001, 0.2)), min_size=1, max_size=80),
    st.floats(1.0, 2.0),
)
def test_a_request_waits_for_what_is_left_of_the_prompts_before_it_and_for_its_own(
    gaps: list[tuple[float, float]], stretch: float
) -> None:
    queue, now_s = PromptQueue(stretch), 0.0
    left: list[float] = []
    for gap_s, work_s in gaps:
        now_s += gap_s
        while left and gap_s > 0:
            done_s = min(left[0], gap_s)
            left[0], gap_s = left[0] - done_s, gap_s - done_s
            if left[0] <= 0:
                del left[0]
        left.append(stretch * work_s)
        wait_s = queue.record_arrival(now_s, work_s)
        assert wait_s == pytest.approx(sum(left), abs=1e-9)
        assert queue.longest_s >= wait_s


def test_a_long_wait_is_forgotten_over_minutes() -> None:
    queue = PromptQueue(1.0)
    queue.record_arrival(0.0, 0.4)
    queue.record_arrival(1.0, 0.01)
    assert queue.longest_s > 0.38
    queue.record_arrival(300.0, 0.01)
    assert queue.longest_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    "text", ["ttft=0.5", "ttft=a,tpot=1", "ttft=0.5,tpot=0", "ttft=1,what=2", ""]
)
def test_a_promise_that_cannot_be_read_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ttft|tpot"):
        ServingSlo.parse(text)


def test_a_promise_is_read() -> None:
    assert ServingSlo.parse("ttft=0.5,tpot=0.15") == SLO
