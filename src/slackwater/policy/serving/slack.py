"""The slack of a service: how late its next work may start (ROSE 4.1, eq. 1 and 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.prompt_queue import STRETCH
from slackwater.policy.serving.step_cost import StepCost

NO_LIMIT_S = float("inf")
_URGENT = 0.5 / STRETCH  # of the longest recent wait, which is stretched


class QueuedPrompt(NamedTuple):
    """A request whose first token is not out: `tokens` of its prompt are still to be computed."""

    arrival_s: float
    tokens: int
    context: int = 0


@dataclass(slots=True)
class ServingState:
    """The service on one device. `oldest_token_s` is the oldest last token of a decoding request;
    by `mean_due_s` the next must be out for all mean times per token to keep the promise.
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
    """The rollout on the same device: requests that decode, and prompt tokens that wait."""

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
    """The least over queued prompts, each as if alone (ROSE eq. 1); a shorter last step is
    interpolated between one row and a full step.
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
    """The longest time to a first token of the queued prompts, if all are served in order from now
    on.
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
    """Whether a queued prompt, begun so much later, waits for over half of the longest recent wait:
    such prompts decide how long the slowest requests wait.
    """
    wait_s = longest_wait_s(state) + later_s
    return len(state.serving.queued) > 0 and wait_s > _URGENT * state.recent_wait_s


def prompt_step_s(state: DeviceState) -> float:
    """The service's next step if it is one of prompts alone."""
    queued, cost = state.serving.queued, state.serving_cost
    tokens = min(sum(prompt.tokens for prompt in queued), state.step_tokens)
    return state.serving_factor * cost.batch_step_s(0, 0, tokens, queued[0].context)


def decode_slack_s(state: DeviceState) -> float:
    """How late a full step may begin in which all decoding requests keep their mean times."""
    serving = state.serving
    prompt = max(state.step_tokens - serving.decoding, 1)
    before = serving.queued[0].context + state.step_tokens if serving.queued else 0
    step_s = state.serving_cost.batch_step_s(serving.decoding, serving.context, prompt, before)
    return serving.mean_due_s - state.now_s - state.serving_factor * step_s


def tpot_slack_s(state: DeviceState) -> float:
    """The least over decoding requests (ROSE eq. 2); all decode in one step."""
    serving = state.serving
    if not serving.decoding:
        return NO_LIMIT_S
    step_s = state.serving_cost.batch_step_s(serving.decoding, serving.context, 0, 0.0)
    return serving.oldest_token_s + state.slo.tpot_s - state.now_s - state.serving_factor * step_s
