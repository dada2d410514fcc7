"""The slack of a service: how much later its next step may start without missing the SLO (ROSE 4.1,
eq. 1 and 2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.prompt_queue import STRETCH
from slackwater.policy.serving.step_cost import StepCost

NO_LIMIT_S = float("inf")
_URGENT = 0.5 / STRETCH  # share of the longest recent wait, which includes the stretch


class QueuedPrompt(NamedTuple):
    """A request without a first token yet: `tokens` of its prompt are still to be computed."""

    arrival_s: float
    tokens: int
    context: int = 0


@dataclass(slots=True)
class ServingState:
    """The service on one device. Among the decoding requests, `oldest_token_s` is the time of the
    last token of the one that waits longest. By `mean_due_s` all must have their next token to keep
    the mean time per token within the SLO.
    """

    queued: Sequence[QueuedPrompt] = ()
    decoding: int = 0
    context: int = 0
    oldest_token_s: float = NO_LIMIT_S
    mean_due_s: float = NO_LIMIT_S

    @property
    def busy(self) -> bool:
        return self.decoding > 0 or len(self.queued) > 0


@dataclass(slots=True)
class RolloutState:
    """The rollout on the same device: its decoding requests and its waiting prompt tokens."""

    decoding: int = 0
    context: int = 0
    prompt_tokens: int = 0
    prompt_context: int = 0

    @property
    def busy(self) -> bool:
        return self.decoding > 0 or self.prompt_tokens > 0


@dataclass(slots=True)
class DeviceState:
    """What an admission rule sees of one device.

    Predicted costs are multiplied with `serving_factor` and `rollout_factor`, which cover errors of
    the prediction. `step_tokens` is the size of a full step of the service. `recent_wait_s` is the
    longest recent wait for a first token. `served_last` says whether the last step was the
    service's. `last_rollout_s` is when the rollout last had a step, or no work. `memory_left` is
    the share of its memory that the service may still fill before rollouts must give some back.
    """

    now_s: float
    slo: ServingSlo
    serving: ServingState
    rollout: RolloutState
    serving_cost: StepCost
    rollout_cost: StepCost
    serving_factor: float = 1.0
    rollout_factor: float = 1.0
    step_tokens: int = 512
    recent_wait_s: float = 0.0
    served_last: bool = True
    last_rollout_s: float = 0.0
    memory_left: float = 1.0


def ttft_slack_s(state: DeviceState) -> float:
    """The least slack of the queued prompts, each as if it ran alone (ROSE eq. 1). The time of the
    last, shorter step is interpolated between one row and a full step.
    """
    queued = state.serving.queued
    if not queued:
        return NO_LIMIT_S
    cost, size, factor = state.serving_cost, state.step_tokens, state.serving_factor
    full_s, least_s = factor * cost.prompt.step_s(size), factor * cost.prompt.step_s(1)
    token_s, pair_s = (full_s - least_s) / size, factor * cost.prompt_pair_s
    half_s = pair_s / 2
    slack_s = NO_LIMIT_S
    for arrival_s, tokens, context in queued:
        steps = -(-tokens // size)
        alone_s = steps * least_s + tokens * (token_s + pair_s * context + half_s * tokens)
        if arrival_s - alone_s < slack_s:
            slack_s = arrival_s - alone_s
    return slack_s + state.slo.ttft_s - state.now_s


def longest_wait_s(state: DeviceState) -> float:
    """The longest time to a first token among the queued prompts, if they are served in order from
    now on.
    """
    cost, factor = state.serving_cost, state.serving_factor
    token_s = factor * cost.prompt.step_s(state.step_tokens) / state.step_tokens
    pair_s = factor * cost.prompt_pair_s
    half_s = pair_s / 2
    wait_s, done_s = 0.0, state.now_s
    for arrival_s, tokens, context in state.serving.queued:
        done_s += tokens * (token_s + pair_s * context + half_s * tokens)
        if done_s - arrival_s > wait_s:
            wait_s = done_s - arrival_s
    return wait_s


def are_prompts_urgent(state: DeviceState, later_s: float = 0.0) -> bool:
    """Whether a queued prompt, started `later_s` from now, would wait for more than half of the
    longest recent wait. Such prompts decide how long the slowest requests wait.
    """
    wait_s = longest_wait_s(state) + later_s
    return len(state.serving.queued) > 0 and wait_s > _URGENT * state.recent_wait_s


def prompt_step_s(state: DeviceState) -> float:
    """The time of the service's next step if it holds prompts only."""
    queued, cost = state.serving.queued, state.serving_cost
    tokens = min(sum(prompt.tokens for prompt in queued), state.step_tokens)
    return state.serving_factor * cost.batch_step_s(0, 0, tokens, queued[0].context)


def decode_slack_s(state: DeviceState) -> float:
    """How much later a full step may start for all decoding requests to keep their mean times."""
    serving = state.serving
    prompt = max(state.step_tokens - serving.decoding, 1)
    before = serving.queued[0].context + state.step_tokens if serving.queued else 0
    step_s = state.serving_cost.batch_step_s(serving.decoding, serving.context, prompt, before)
    return serving.mean_due_s - state.now_s - state.serving_factor * step_s


def tpot_slack_s(state: DeviceState) -> float:
    """The least slack of the decoding requests, which all decode in one step (ROSE eq. 2)."""
    serving = state.serving
    if not serving.decoding:
        return NO_LIMIT_S
    step_s = state.serving_cost.batch_step_s(serving.decoding, serving.context, 0, 0.0)
    return serving.oldest_token_s + state.slo.tpot_s - state.now_s - state.serving_factor * step_s
