"""How long training nodes roll out themselves at the start of a step, before they give way to the
trainer (RLBoost 4.1, Algorithm 1). Pure: state and view in, decision or new state out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from slackwater.policy.rollout.forecast import Forecast, RemainingTurns


@dataclass(frozen=True, slots=True)
class SeedingState:
    """What is carried from step to step: `memory` has the window by number of instances, `pace` is
    how much slower than forecast remote generation is.
    """

    window_s: float
    most_remote: int | None = None
    memory: Mapping[int, float] = field(default_factory=dict)
    train_tokens_per_s: float | None = None
    pace: float = 1.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a step's time went; `steady` if the number of remote instances never changed."""

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
    """The step at this moment; no `forecast` before enough is known. `ready_tokens` are complete
    and untrained; `remote_joined` counts instances that still pull.
    """

    elapsed_s: float
    window_s: float
    remote_ready: int
    remote_joined: int
    local_engines: int
    turns: int
    turns_left: int
    ready_tokens: float
    remaining: RemainingTurns
    forecast: Forecast | None


class SeedingPolicy(Protocol):
    """Decides when local engines stop, and whether they come back."""

    def start(self) -> SeedingState:
        """Before the first step."""

    def window_s(self, state: SeedingState, remote: int) -> float:
        """The window to begin a step with when there are `remote` instances."""

    def stop_reason(self, state: SeedingState, view: SeedingView) -> str | None:
        """Why local engines should stop now, or None."""

    def resume_reason(self, state: SeedingState, view: SeedingView) -> str | None:
        """Why a waiting trainer should give its devices to local engines again, or None."""

    def learn_from_step(self, state: SeedingState, times: StepTimes) -> SeedingState: ...

    def most_remote(self, state: SeedingState, view: SeedingView) -> int | None:
        """How many remote instances such a step can use; None: any number."""


def count_useful_remote(times: StepTimes, window_s: float) -> int | None:
    """With how many instances rollout takes no longer than training (Algorithm 1, line 10)."""
    if times.train_s <= 0:
        return None
    work = times.remote_s * times.mean_remote + window_s * times.local_engines
    return max(1, math.ceil(work / times.train_s))


@dataclass(frozen=True, slots=True)
class ColocatedSeeding:
    """Baseline: all turns on the training nodes, then training; no remote instance is of use."""

    def start(self) -> SeedingState:
        return SeedingState(window_s=0.0, most_remote=0)

    def window_s(self, state: SeedingState, remote: int) -> float:
        return state.window_s

    def stop_reason(self, state: SeedingState, view: SeedingView) -> str | None:
        return "all turns are done" if view.turns_left == 0 else None

    def resume_reason(self, state: SeedingState, view: SeedingView) -> str | None:
        return None

    def learn_from_step(self, state: SeedingState, times: StepTimes) -> SeedingState:
        return state

    def most_remote(self, state: SeedingState, view: SeedingView) -> int | None:
        return state.most_remote


@dataclass(frozen=True, slots=True)
class AdaptiveWindow:
    """RLBoost: a window of time, fixed when the step begins, moved by what trainer and instances
    waited in the last step. `initial_s` and `eta` are those of the authors' published manager.
    Without `seeds` the window is 0; without `remembers` it is not looked up when a number of
    instances returns.
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

    def stop_reason(self, state: SeedingState, view: SeedingView) -> str | None:
        if view.turns_left == 0:
            return "all turns are done"
        if view.remote_joined == 0 or view.elapsed_s < view.window_s:
            return None
        return f"the window of {view.window_s:.0f} s is over"

    def resume_reason(self, state: SeedingState, view: SeedingView) -> str | None:
        stranded = view.turns_left > 0 and view.remote_joined == 0
        return "no remote instance is left" if stranded else None

    def learn_from_step(self, state: SeedingState, times: StepTimes) -> SeedingState:
        if not self.seeds:
            return replace(state, most_remote=count_useful_remote(times, 0.0))
        change_s = (times.trainer_wait_s - times.remote_wait_s) / self.eta
        window_s = max(0.0, state.window_s + change_s)
        memory = dict(state.memory)
        if times.steady and self.remembers:
            memory[times.remote_now] = window_s
        most = count_useful_remote(times, window_s)
        if self.remembers:
            window_s = memory.get(times.remote_now, window_s)
        return replace(state, window_s=window_s, most_remote=most, memory=memory)

    def most_remote(self, state: SeedingState, view: SeedingView) -> int | None:
        return view.local_engines if state.most_remote is None else state.most_remote
