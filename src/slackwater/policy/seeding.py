"""How long training nodes roll out themselves at the start of a step (RLBoost 4.1, Algorithm 1).

Each step begins with local engines generating ("seeding"); then they give way to the trainer, while the
remote instances go on with the unfinished turns. Pure: state and view in, decision or new state out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from slackwater.policy.forecast import Forecast, Remaining


@dataclass(frozen=True, slots=True)
class SeedingState:
    """What is carried from step to step. `memory` is the window that suited each number of instances.

    `train_tokens_per_s` is learned; so is `pace`, by how much remote generation is slower than forecast.
    """

    window_s: float
    most_remote: int | None = None
    memory: Mapping[int, float] = field(default_factory=dict)
    train_tokens_per_s: float | None = None
    pace: float = 1.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a finished step's time went; `steady` if the number of remote instances never changed."""

    train_s: float
    trainer_wait_s: float
    remote_wait_s: float
    remote_s: float
    seeded_s: float
    trained_tokens: int
    mean_remote: float
    remote_now: int
    local_engines: int
    steady: bool
    step_s: float


@dataclass(frozen=True, slots=True)
class SeedingView:
    """The step at this moment. Without `forecast` too little has been learned to look ahead.

    `ready_tokens` are complete and not yet trained on. `remote_joined` counts instances that still pull.
    """

    elapsed_s: float
    window_s: float
    remote_ready: int
    remote_joined: int
    local_engines: int
    turns: int
    turns_left: int
    ready_tokens: float
    remaining: Remaining
    forecast: Forecast | None


class SeedingPolicy(Protocol):
    """Decides when local engines stop, and whether they come back."""

    def start(self) -> SeedingState:
        """Before the first step."""
        ...

    def window_s(self, state: SeedingState, remote: int) -> float:
        """The window to begin a step with when there are `remote` instances."""
        ...

    def ends(self, state: SeedingState, view: SeedingView) -> str | None:
        """Why local engines should stop now, or None."""
        ...

    def resumes(self, state: SeedingState, view: SeedingView) -> str | None:
        """Why a waiting trainer should give its devices to local engines again, or None."""
        ...

    def after_step(self, state: SeedingState, times: StepTimes) -> SeedingState:
        """What the step taught."""
        ...

    def most_remote(self, state: SeedingState, view: SeedingView) -> int | None:
        """How many remote instances are worth having for a step that begins like this; None: any number."""
        ...


def _most_remote(times: StepTimes, window_s: float) -> int | None:
    """The number of instances with which rollout takes no longer than training (Algorithm 1, line 10)."""
    if times.train_s <= 0:
        return None
    work = times.remote_s * times.mean_remote + window_s * times.local_engines
    return max(1, math.ceil(work / times.train_s))


@dataclass(frozen=True, slots=True)
class Colocated:
    """Baseline: all turns on the training nodes, then training; no remote instance is of use."""

    def start(self) -> SeedingState:
        return SeedingState(window_s=0.0, most_remote=0)

    def window_s(self, state: SeedingState, remote: int) -> float:
        del remote
        return state.window_s

    def ends(self, state: SeedingState, view: SeedingView) -> str | None:
        del state
        return "all turns are done" if view.turns_left == 0 else None

    def resumes(self, state: SeedingState, view: SeedingView) -> str | None:
        del state, view
        return None

    def after_step(self, state: SeedingState, times: StepTimes) -> SeedingState:
        del times
        return state

    def most_remote(self, state: SeedingState, view: SeedingView) -> int | None:
        del view
        return state.most_remote


@dataclass(frozen=True, slots=True)
class AdaptiveWindow:
    """RLBoost: a window of time, moved by what trainer and instances waited in the last step.

    The window is fixed when the step begins: when it is over the trainer takes its devices, whether instances
    have their weights yet or not. `initial_s` and `eta` are those of the authors' published manager.
    Without `seeds` the window is always 0 (all turns go to remote instances if there are any); without
    `remembers` the window is not looked up when a number of instances returns.
    """

    initial_s: float = 150.0
    eta: float = 3.0
    seeds: bool = True
    remembers: bool = True

    def start(self) -> SeedingState:
        return SeedingState(window_s=self.initial_s if self.seeds else 0.0)

    def window_s(self, state: SeedingState, remote: int) -> float:
        if self.remembers and self.seeds:
            return state.memory.get(remote, state.window_s)
        return state.window_s

    def ends(self, state: SeedingState, view: SeedingView) -> str | None:
        del state
        if view.turns_left == 0:
            return "all turns are done"
        if view.remote_joined == 0 or view.elapsed_s < view.window_s:
            return None
        return f"the window of {view.window_s:.0f} s is over"

    def resumes(self, state: SeedingState, view: SeedingView) -> str | None:
        del state
        stranded = view.turns_left > 0 and view.remote_joined == 0
        return "no remote instance is left" if stranded else None

    def after_step(self, state: SeedingState, times: StepTimes) -> SeedingState:
        if not self.seeds:
            return replace(state, most_remote=_most_remote(times, 0.0))
        change_s = (times.trainer_wait_s - times.remote_wait_s) / self.eta
        window_s = max(0.0, state.window_s + change_s)
        memory = dict(state.memory)
        if times.steady and self.remembers:
            memory[times.remote_now] = window_s
        most = _most_remote(times, window_s)
        if self.remembers:
            window_s = memory.get(times.remote_now, window_s)
        return replace(state, window_s=window_s, most_remote=most, memory=memory)

    def most_remote(self, state: SeedingState, view: SeedingView) -> int | None:
        return view.local_engines if state.most_remote is None else state.most_remote


@dataclass(frozen=True, slots=True)
class BalancedFinish:
    """Stop seeding when going on with it would not bring the step's end any nearer.

    The balance that the adaptive window approaches over steps, found inside each step: the end is forecast
    for stopping now and for stopping a little later, from the turns that are left, the lengths seen and the
    step times measured; so a loss or a gain of instances is answered at once. The window is the fallback
    until enough is known. A trainer that waits takes part again when that saves more than switching costs.
    Without `seeds` all turns go to remote instances if there are any; without `remembers` every step begins
    as if it were the first, with nothing known of the trainer's rate or of how forecasts turned out.
    """

    fallback: AdaptiveWindow = AdaptiveWindow()
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

    def ends(self, state: SeedingState, view: SeedingView) -> str | None:
        if view.turns_left == 0:
            return "all turns are done"
        if not self.seeds:
            return "no seeding" if view.remote_joined else None
        if view.remote_ready == 0 or view.remote_ready < self.ready_share * view.remote_joined:
            return None  # most still pull their weights
        if view.forecast is None or len(view.remaining) == 0:
            few = 2 * view.remote_joined < view.local_engines  # too few to carry on alone
            early = 2 * view.turns_left > view.turns  # nor is there much to train on yet
            return None if few or early else self.fallback.ends(state, view)
        now_s = self._end_s(view, view.forecast, 0.0, self.switch_s)
        later_s = min(self._end_s(view, view.forecast, h, self.switch_s) for h in self.horizons_s)
        if now_s <= later_s:
            return f"the step ends in {now_s:.0f} s, in {later_s:.0f} s with more seeding"
        return None

    def resumes(self, state: SeedingState, view: SeedingView) -> str | None:
        del state
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
        # Besides the switches, what moves there and back is prefilled twice.
        enough_s = 2 * self.switch_s + self.resume_share * without_s
        return f"saves {saved_s:.0f} of {without_s:.0f} s" if saved_s > enough_s else None

    def after_step(self, state: SeedingState, times: StepTimes) -> SeedingState:
        learned = self.fallback.after_step(state, times)
        learned = replace(learned, most_remote=_most_remote(times, times.seeded_s))
        if not self.remembers:
            return replace(self.start(), most_remote=learned.most_remote)
        rate = state.train_tokens_per_s
        if times.train_s > 0 and times.trained_tokens > 0:
            seen = times.trained_tokens / times.train_s
            rate = seen if rate is None else rate + self.learning * (seen - rate)
        return replace(learned, train_tokens_per_s=rate, pace=self._pace(state, times))

    def _pace(self, state: SeedingState, times: StepTimes) -> float:
        """A trainer that waited longer than `wait_share` of the step was promised responses too early."""
        share = times.trainer_wait_s / max(times.step_s, 1e-9)
        gain = 2.5 if times.steady else 1.25  # instances that came or went explain part of it
        return min(max(state.pace * math.exp(gain * (share - self.wait_share)), 0.7), 2.0)

    def most_remote(self, state: SeedingState, view: SeedingView) -> int | None:
        """As many as the last step's work would fill; more while the forecast is shorter by `worth` with one more."""
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
        """When the step ends if local engines go on for `seed_s` and then give way."""
        turns, done = view.remaining, 0.0
        if seed_s:
            together = view.remote_joined + view.local_engines
            turns, done = forecast.after(turns, together, seed_s)
        remote = max(view.remote_joined, 1)
        return seed_s + forecast.step_end_s(turns, remote, view.ready_tokens + done, switch_s)
