"""Forecast when the remaining turns and the step end, from learned lengths and step times."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slackwater.policy.rollout.step_time import StepTime

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RemainingTurns:
    """Unfinished turns: the tokens that each will still generate (drawn from `ResponseLengths`),
    and its context.
    """

    left_tokens: Floats
    context_tokens: Floats

    def __len__(self) -> int:
        return len(self.left_tokens)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicts turns that are spread evenly over equal instances. `pace` scales the step time."""

    step: StepTime
    kv_tokens: int
    train_tokens_per_s: float
    prompt_tokens: float = 0.0
    pace: float = 1.0

    def finish_times_s(self, turns: RemainingTurns, instances: int) -> tuple[Floats, Floats]:
        """When each turn ends and how many response tokens it has then, shortest turn first."""
        order = np.argsort(turns.left_tokens, kind="stable")
        left, context = turns.left_tokens[order], turns.context_tokens[order]
        alive = np.arange(len(left), 0, -1, dtype=np.float64)
        gaps = np.diff(left, prepend=0.0)
        context_alive = np.cumsum(context[::-1])[::-1] + alive * (left - gaps / 2)
        step_s = self._steps_s(alive, context_alive, instances)
        return np.cumsum(gaps * step_s), left + context - self.prompt_tokens

    def _steps_s(self, turns: Floats, context: Floats, instances: int) -> Floats:
        batch, held = turns / instances, context / instances
        # Turns whose contexts do not fit run one after another.
        crowding = np.maximum(held / self.kv_tokens, 1.0)
        model = self.step
        batch, held = np.maximum(batch / crowding, 1.0), held / crowding
        shared = model.base_s + model.per_turn_s * batch + model.per_token_s * held
        steps_s: Floats = shared * crowding * self.pace
        return steps_s

    def advance(
        self, turns: RemainingTurns, instances: int, seconds: float
    ) -> tuple[RemainingTurns, float]:
        """The turns left after `seconds`, and the response tokens of the turns that ended."""
        if len(turns) == 0:
            return turns, 0.0
        alive = np.array([float(len(turns))])
        context = np.array([float(turns.context_tokens.sum())])
        steps = seconds / float(self._steps_s(alive, context, instances)[0])
        left = turns.left_tokens - steps
        going = left > 0
        total = turns.left_tokens + turns.context_tokens - self.prompt_tokens
        rest = RemainingTurns(left[going], turns.context_tokens[going] + steps)
        return rest, float(total[~going].sum())

    def step_end_s(
        self, turns: RemainingTurns, instances: int, ready_tokens: float, trainer_free_s: float
    ) -> float:
        """When the trainer has trained on all responses, if it can begin at `trainer_free_s`."""
        rate = self.train_tokens_per_s
        if len(turns) == 0:
            return trainer_free_s + ready_tokens / rate
        ends_s, tokens = self.finish_times_s(turns, instances)
        to_train = np.cumsum(tokens[::-1])[::-1]  # from this response on
        begun_s = trainer_free_s + (ready_tokens + float(tokens.sum())) / rate
        return max(begun_s, float(np.max(np.maximum(ends_s, trainer_free_s) + to_train / rate)))
