"""Seeding that ends by a forecast of the step's end. RLBoost's fixed window is in `seeding.py`."""

import math
from dataclasses import dataclass, field, replace

from slackwater.policy.rollout.forecast import Forecast
from slackwater.policy.rollout.seeding import (
    AdaptiveWindow,
    SeedingState,
    SeedingView,
    StepTimes,
    count_useful_remote,
)


@dataclass(frozen=True, slots=True)
class BalancedFinish:
    """Stop seeding when more of it would not end the step earlier.

    The step's end is forecast for stopping now and for stopping later, from the turns left, the
    response lengths seen and the step times measured. So a change in the number of instances counts
    at once. `fallback` decides until enough is known. A waiting trainer's devices roll out again
    when that saves more than switching costs. Without `seeds` all turns go to remote instances.
    Without `remembers` nothing is learned from earlier steps.
    """

    fallback: AdaptiveWindow = field(default_factory=AdaptiveWindow)
    switch_s: float = 4.0
    horizons_s: tuple[float, ...] = (8.0, 20.0, 45.0, 90.0, 180.0)
    learning: float = 0.5
    worth: float = 0.02
    wait_share: float = 0.02
    first_pace: float = 1.2
    ready_share: float = 0.75
    resume_share: float = 0.05
    at_most: int = 64
    seeds: bool = True
    remembers: bool = True

    def start(self) -> SeedingState:
        return replace(self.fallback.start(), pace=self.first_pace)

    def window_s(self, state: SeedingState, remote: int) -> float:
        return self.fallback.window_s(state, remote)

    def stop_reason(self, state: SeedingState, view: SeedingView) -> str | None:
        if view.turns_left == 0:
            return "all turns are done"
        if not self.seeds:
            return "no seeding" if view.remote_joined else None
        if view.remote_ready == 0 or view.remote_ready < self.ready_share * view.remote_joined:
            return None  # most instances still pull weights
        if view.forecast is None or len(view.remaining) == 0:
            few = 2 * view.remote_joined < view.local_engines  # too few to finish the step alone
            early = 2 * view.turns_left > view.turns  # there is little to train on yet
            return None if few or early else self.fallback.stop_reason(state, view)
        now_s = self._end_s(view, view.forecast, 0.0, self.switch_s)
        later_s = min(self._end_s(view, view.forecast, h, self.switch_s) for h in self.horizons_s)
        if now_s <= later_s:
            return f"the step ends in {now_s:.0f} s, in {later_s:.0f} s with more seeding"
        return None

    def resume_reason(self, state: SeedingState, view: SeedingView) -> str | None:
        if view.turns_left == 0:
            return None
        if view.remote_joined == 0:
            return "no remote instance is left"
        unknown = view.forecast is None or len(view.remaining) == 0 or view.local_engines == 0
        if view.forecast is None or unknown or not self.seeds:
            return None
        without_s = self._end_s(view, view.forecast, 0.0, 0.0)
        with_s = min(
            2 * self.switch_s + self._end_s(view, view.forecast, horizon_s, 0.0)
            for horizon_s in self.horizons_s
        )
        saved_s = without_s - with_s
        # Besides the switches, turns that move there and back are prefilled twice.
        enough_s = 2 * self.switch_s + self.resume_share * without_s
        return f"saves {saved_s:.0f} of {without_s:.0f} s" if saved_s > enough_s else None

    def learn_from_step(self, state: SeedingState, times: StepTimes) -> SeedingState:
        learned = self.fallback.learn_from_step(state, times)
        learned = replace(learned, most_remote=count_useful_remote(times, times.seeded_s))
        if not self.remembers:
            return replace(self.start(), most_remote=learned.most_remote)
        rate = state.train_tokens_per_s
        if times.train_s > 0 and times.trained_tokens > 0:
            seen = times.trained_tokens / times.train_s
            rate = seen if rate is None else rate + self.learning * (seen - rate)
        return replace(learned, train_tokens_per_s=rate, pace=self._pace(state, times))

    def _pace(self, state: SeedingState, times: StepTimes) -> float:
        """The pace factor of the next step's forecast. It rises if the trainer waited for more than
        `wait_share` of the step, because then the forecast ended seeding too early.
        """
        share = times.trainer_wait_s / max(times.step_s, 1e-9)
        gain = 2.5 if times.steady else 1.25  # changes of instances explain part of the wait
        return min(max(state.pace * math.exp(gain * (share - self.wait_share)), 0.7), 2.0)

    def most_remote(self, state: SeedingState, view: SeedingView) -> int | None:
        """As many instances as the last step kept busy, and more while each further one shortens
        the forecast by the share `worth`.
        """
        least = self.fallback.most_remote(state, view)
        if view.forecast is None or len(view.remaining) == 0 or least is None:
            return least
        remote = least
        best_s = self._best_end_s(view, view.forecast, remote)
        while remote < self.at_most:
            next_s = self._best_end_s(view, view.forecast, remote + 1)
            if next_s > (1 - self.worth) * best_s:
                break
            remote, best_s = remote + 1, next_s
        return remote

    def _best_end_s(self, view: SeedingView, forecast: Forecast, remote: int) -> float:
        supposed = replace(view, remote_joined=remote)
        return min(
            self._end_s(supposed, forecast, seed_s, self.switch_s)
            for seed_s in (0.0, *self.horizons_s)
        )

    @staticmethod
    def _end_s(view: SeedingView, forecast: Forecast, seed_s: float, switch_s: float) -> float:
        """When the step ends if the local engines roll out for another `seed_s` and then stop."""
        turns, done = view.remaining, 0.0
        if seed_s:
            together = view.remote_joined + view.local_engines
            turns, done = forecast.advance(turns, together, seed_s)
        remote = max(view.remote_joined, 1)
        return seed_s + forecast.step_end_s(turns, remote, view.ready_tokens + done, switch_s)
