"""Admission of rollout steps on a serving device: whether a rollout may run one step now, and how
large it may be (ROSE 4.1). A step holds all decoding requests and some tokens of prompts.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from slackwater.model.errors import ConfigError
from slackwater.policy.serving.slack import (
    DeviceState,
    are_prompts_urgent,
    decode_slack_s,
    tpot_slack_s,
    ttft_slack_s,
)

_FINEST_CHUNK = 32  # tokens; a smaller chunk of a prompt is not worth a step


class RolloutGrant(NamedTuple):
    """Permission for one rollout step with at most `prompt_tokens`, predicted to take `step_s`."""

    prompt_tokens: int
    step_s: float


class AdmissionRule(Protocol):
    """Decides for one device at one time. Called when the rollout has work."""

    def grant(self, state: DeviceState) -> RolloutGrant | None:
        """The rollout's step, or None if the device serves or stays idle."""
        ...


def rollout_step_s(state: DeviceState, prompt_tokens: int) -> float:
    """A conservative prediction of the time of a rollout step."""
    rollout = state.rollout
    return state.rollout_factor * state.rollout_cost.batch_step_s(
        rollout.decoding, rollout.context, prompt_tokens, rollout.prompt_context
    )


@dataclass(frozen=True, slots=True)
class NoLending:
    """Never grants a rollout step."""

    def grant(self, state: DeviceState) -> RolloutGrant | None:
        return None


@dataclass(frozen=True, slots=True)
class AlternateSteps:
    """Alternates between steps of the service and of the rollout, as spatial sharing does. With a
    large chunk it behaves like an engine that treats both as equal requests (ROSE 6.1).
    """

    chunk_tokens: int = 512

    def grant(self, state: DeviceState) -> RolloutGrant | None:
        if state.serving.busy and not state.served_last:
            return None
        tokens = min(self.chunk_tokens, state.rollout.prompt_tokens)
        return RolloutGrant(tokens, rollout_step_s(state, tokens))


@dataclass(frozen=True, slots=True)
class SlackGate:
    """Grants a step with a fixed chunk, or else a decode step, if it fits into the smaller of the
    chosen slacks. Alternates with the service's steps.
    """

    ttft: bool = True
    tpot: bool = True
    chunk_tokens: int = 512

    def grant(self, state: DeviceState) -> RolloutGrant | None:
        if state.serving.busy and not state.served_last:
            return None
        slack_s = ttft_slack_s(state) if self.ttft else float("inf")
        if self.tpot:
            slack_s = min(slack_s, tpot_slack_s(state))
        tokens = min(self.chunk_tokens, state.rollout.prompt_tokens)
        step_s = rollout_step_s(state, tokens)
        if step_s <= slack_s:
            return RolloutGrant(tokens, step_s)
        if tokens and state.rollout.decoding:
            step_s = rollout_step_s(state, 0)
            if step_s <= slack_s:
                return RolloutGrant(0, step_s)
        return None


@dataclass(frozen=True, slots=True)
class Foresight:
    """The default rule. Urgent prompts go first: delaying a prompt saves no time. Decoding of the
    service is slowed down within its SLO: a decode step costs the same whenever it runs. Time is
    reserved for prompts that are about to arrive.

    - Prompts are queued: a rollout may run one decode step after each step of the service, unless a
      prompt is urgent (`are_prompts_urgent`). If it had no step for `starves_after_s` it may run
      one beside urgent prompts too, because otherwise its turns count as stalled and move away.
    - No prompts are queued: a rollout step may take what the TTFT objective leaves after the
      longest wait expected (`recent_wait_s`), and at least `least_share` of the objective. A step
      with prompt tokens takes at most `most_share` of it, which bounds how long an arriving request
      finds the device busy. On a slow device such a step would hold few tokens, so it may take
      `slow_share`, but at most a quarter longer than a step with one prompt token.
    - The service decodes: between two of its tokens rollouts get at most the share `pace` of the
      time that TPOT leaves after the service's own step, and none while any request is behind its
      mean time per token. Requests that decode more slowly hold their memory longer. So the pace
      falls when less than `ample_memory` of the service's memory is left: down to one step after
      each step of the service, and to none below `tight_memory`.
    - The prompt chunk is as large as fits these limits.
    """

    pace: float = 0.25
    least_share: float = 0.04
    most_share: float = 0.04
    slow_share: float = 0.1
    tight_memory: float = 0.1
    ample_memory: float = 0.5
    most_tokens: int = 2048
    starves_after_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.pace < 1:
            raise ConfigError.of("pace", self.pace, "must be between 0 and 1")
        if not 0 < self.tight_memory <= self.ample_memory <= 1:
            bounds = (self.tight_memory, self.ample_memory)
            fix = "must rise and lie above 0 and up to 1"
            raise ConfigError.of("tight_memory, ample_memory", bounds, fix)

    def grant(self, state: DeviceState) -> RolloutGrant | None:
        serving, slo, rollout = state.serving, state.slo, state.rollout
        if serving.queued:
            return self._grant_decode_step(state)
        limit_s = max(slo.ttft_s - state.recent_wait_s, self.least_share * slo.ttft_s)
        if serving.decoding:
            own_s = state.serving_factor * state.serving_cost.batch_step_s(
                serving.decoding, serving.context, 0, 0.0
            )
            pace = self.pace
            if not state.served_last:
                pace *= min(state.memory_left / self.ample_memory, 1.0)
            elif state.memory_left < self.tight_memory:
                return None
            paced_s = serving.oldest_token_s + pace * (slo.tpot_s - own_s) - state.now_s
            limit_s = min(limit_s, paced_s, serving.mean_due_s - state.now_s - own_s)
        least_s = rollout_step_s(state, 0) if rollout.decoding else 0.0
        if least_s > limit_s:
            return None
        if not rollout.prompt_tokens:
            return RolloutGrant(0, least_s)
        slow_s = min(1.25 * rollout_step_s(state, 1), self.slow_share * slo.ttft_s)
        most_chunk_s = max(self.most_share * slo.ttft_s, slow_s)
        # Slightly less, so that rounding does not push the step over its limit.
        chunk_s = 0.999999 * min(limit_s, most_chunk_s) / state.rollout_factor
        most = min(self.most_tokens, rollout.prompt_tokens)
        tokens = state.rollout_cost.chunk_within(
            chunk_s, rollout.decoding, rollout.context, rollout.prompt_context, most
        )
        if tokens < min(most, _FINEST_CHUNK):
            return RolloutGrant(0, least_s) if rollout.decoding else None
        return RolloutGrant(tokens, rollout_step_s(state, tokens))

    def _grant_decode_step(self, state: DeviceState) -> RolloutGrant | None:
        """A decode step after a step of the service, while no queued prompt is urgent."""
        serving, rollout = state.serving, state.rollout
        if not state.served_last or not rollout.decoding:
            return None
        step_s = rollout_step_s(state, 0)
        starves = state.now_s - state.last_rollout_s > self.starves_after_s
        if not starves and are_prompts_urgent(state, step_s):
            return None
        if serving.decoding:
            most_s = min(tpot_slack_s(state), decode_slack_s(state))
            if step_s > most_s or state.memory_left < self.tight_memory:
                return None
        return RolloutGrant(0, step_s)
