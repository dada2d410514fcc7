"""The arbiter of a serving device: whether the next step is the service's, the rollout's or
nobody's. Each device has one, live and simulated. It learns the device's step costs, arrivals and
memory use.
"""

from dataclasses import replace
from enum import StrEnum
from sys import maxsize
from typing import TypeAlias

from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.admission import RolloutGrant
from slackwater.policy.serving.kv_budget import KvBudget
from slackwater.policy.serving.modes import LendingMode
from slackwater.policy.serving.overload import Overload
from slackwater.policy.serving.prompt_queue import PromptQueue
from slackwater.policy.serving.slack import (
    DeviceState,
    RolloutState,
    ServingState,
    are_prompts_urgent,
    decode_slack_s,
    longest_wait_s,
    prompt_step_s,
)
from slackwater.policy.serving.step_cost import Correction, StepCost, StepWork


class DeviceUse(StrEnum):
    """What the device does next if the rollout gets no step."""

    SERVE = "serve"
    PREFILL = "prefill"  # the service's prompts, while its decoding requests wait
    REST = "rest"


NextStep: TypeAlias = DeviceUse | RolloutGrant


class Arbiter:
    """`capacity` is the KV memory that both models share, in pages or any other unit. While the
    device is lent, `loan_weights` of it hold the rollout's weights; otherwise the service may use
    all.
    """

    def __init__(
        self,
        mode: LendingMode,
        slo: ServingSlo,
        serving_cost: StepCost,
        rollout_cost: StepCost,
        *,
        capacity: int,
        loan_weights: int = 0,
        step_tokens: int = 512,
    ) -> None:
        self.mode, self.slo = mode, slo
        self._whole, self._lending = capacity, False
        self.loan_weights = loan_weights
        self._serving_ratio, self._rollout_ratio = Correction(), Correction()
        self._queue = PromptQueue()
        self._state = DeviceState(
            now_s=0.0,
            slo=slo,
            serving=ServingState(),
            rollout=RolloutState(),
            serving_cost=serving_cost,
            rollout_cost=rollout_cost,
            step_tokens=step_tokens,
        )
        self._serving_peak = 0
        self._overload, self._forecast = Overload(slo.share), Overload(slo.share)
        self.stopped = False

    @property
    def rollout_cost(self) -> StepCost:
        """The cost of the present rollout's steps; set when another model rolls out."""
        return self._state.rollout_cost

    @rollout_cost.setter
    def rollout_cost(self, cost: StepCost) -> None:
        self._state.rollout_cost, self._state.rollout_factor = cost, 1.0
        self._rollout_ratio = Correction()

    # ---- compute ----
    def next_step(self, now_s: float, serving: ServingState, rollout: RolloutState) -> NextStep:
        """Decide the next step. The caller runs it and reports how long it took."""
        state = self._state
        state.now_s, state.serving, state.rollout = now_s, serving, rollout
        self.update_stopped(now_s)
        if not rollout.busy:
            state.last_rollout_s = now_s
        grant = self.mode.admission.grant(state) if rollout.busy and not self.stopped else None
        if grant is not None:
            late = serving.queued and self.mode.stops and longest_wait_s(state) > self.slo.ttft_s
            if not late:
                state.served_last, state.last_rollout_s = False, now_s
                return grant
        if serving.busy:
            state.served_last = True
            return DeviceUse.PREFILL if self._are_prompts_alone(state) else DeviceUse.SERVE
        if rollout.busy and not self.stopped:
            self._rollout_ratio.relax()
            state.rollout_factor = self._rollout_ratio.upper
        return DeviceUse.REST

    def _are_prompts_alone(self, state: DeviceState) -> bool:
        """Whether the service's next step should hold prompts only. During a loan more of its
        requests decode at a time, and a step with prompts carries them all. Urgent prompts run
        without them, as long as the decoding requests keep their mean times.
        """
        lends = self._lending and self.mode.foresees
        if not lends or not state.serving.decoding or not are_prompts_urgent(state):
            return False
        return prompt_step_s(state) <= decode_slack_s(state)

    def record_arrival(self, now_s: float, prompt_tokens: int) -> None:
        state = self._state
        work_s = state.serving_cost.prompt_s(prompt_tokens, 0, state.step_tokens)
        wait_s = self._queue.record_arrival(now_s, state.serving_factor * work_s)
        state.recent_wait_s = self._queue.longest_s
        if self.mode.foresees:
            self._forecast.record_answer(now_s, kept=wait_s <= self.slo.ttft_s)

    # ---- SLO ----
    def update_stopped(self, now_s: float) -> None:
        """Set `stopped`, so that the rollout gets no steps, if the SLO is missed or soon
        would be.
        """
        self.stopped = not self.keeps_slo(now_s)

    def keeps_slo(self, now_s: float) -> bool:
        """Whether the SLO is kept; always true in modes that never stop. If it is not, the lender
        takes the device back. May be called from any thread.
        """
        broken = self._overload.is_broken(now_s) or self._forecast.is_broken(now_s)
        return not (self.mode.stops and broken)

    def record_first_token(self, now_s: float, ttft_s: float) -> None:
        self._overload.record_answer(now_s, kept=ttft_s <= self.slo.ttft_s)

    def record_end(self, now_s: float, ttft_s: float, tpot_s: float) -> None:
        if tpot_s > self.slo.tpot_s and ttft_s <= self.slo.ttft_s:
            self._overload.record_miss(now_s)

    # ---- step costs ----
    def record_service_step(self, work: StepWork, took_s: float) -> None:
        ratio = self._serving_ratio
        ratio.observe(self._state.serving_cost.step_s(work), took_s)
        self._state.serving_factor = ratio.upper

    def measure_needed_s(self, work: StepWork, took_s: float) -> float:
        """The device time that a step of the service needs: a decode step only needs to run as
        often as TPOT demands.
        """
        return took_s if work.prompt_pairs else took_s * min(took_s / self.slo.tpot_s, 1.0)

    def record_rollout_step(self, work: StepWork, took_s: float) -> None:
        ratio, state = self._rollout_ratio, self._state
        ratio.observe(state.rollout_cost.step_s(work), took_s)
        state.rollout_factor = ratio.upper

    # ---- memory ----
    @property
    def loan_weights(self) -> int:
        """The memory for the rollout's weights; set when another model is to roll out."""
        return self._loan_weights

    @loan_weights.setter
    def loan_weights(self, size: int) -> None:
        self._loan_weights = size
        self.budget = KvBudget(max(self._whole - size, 0))
        self._watch_budget()

    def may_lend(self, serving_use: int) -> bool:
        """Whether the service's memory use and the headroom fit beside the rollout's weights."""
        return serving_use + self.budget.headroom < self.budget.capacity

    def kv_share(self, serving_use: int) -> float:
        """The service's memory use, as a share of the memory that a loan leaves."""
        return min(serving_use / max(self.budget.capacity, 1), 1.0)

    def begin_loan(self) -> None:
        """The rollout's weights come: the service has the rest of the memory."""
        self._lending = True

    def end_loan(self) -> None:
        """Nothing of the rollout is left: all memory is the service's again."""
        self._lending = False
        self.budget = replace(self.budget, lent=0)
        self._watch_budget()

    @property
    def lent(self) -> int:
        """The most memory that rollouts may use; none while the service misses its SLO."""
        if self.stopped:
            return 0
        if self.mode.memory == "static":
            return self.budget.capacity // 2
        return self.budget.lent

    @property
    def serving_limit(self) -> int:
        """The service's memory limit: all but a loan's weights, unless memory is partitioned."""
        if self.mode.memory == "static":
            return self.budget.capacity - self.lent
        return self.budget.capacity if self._lending else self._whole

    def begin_step(self, serving_use: int) -> None:
        """Begin an RL step: set the budget from what the service used since the last one."""
        if self.mode.memory == "preemptive":
            self.budget = self.budget.renew(max(self._serving_peak, serving_use))
            self._watch_budget()
        self._serving_peak = serving_use

    def record_memory_use(self, serving_use: int) -> bool:
        """Record the service's memory use. Return whether it was so high that the rollout's budget
        was cut.
        """
        if serving_use > self._serving_peak:
            self._serving_peak = serving_use
        self._state.memory_left = max(1.0 - serving_use / max(self._pressed_above, 1), 0.0)
        if serving_use <= self._pressed_above:
            return False
        self.budget = self.budget.cut_for(serving_use)
        self._watch_budget()
        return True

    def _watch_budget(self) -> None:
        """Store the use above which the budget is cut, because it is compared after every step."""
        yields = self.mode.memory == "preemptive" and self.budget.lent > 0
        self._pressed_above = self.budget.pressed_above if yields else maxsize
