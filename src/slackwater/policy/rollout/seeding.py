"""Seeding: how long training nodes roll out at the start of a step, before they train (RLBoost 4.1,
Algorithm 1). Policies are pure: they return a decision or a new state.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from slackwater.policy.rollout.forecast import Forecast, RemainingTurns


@dataclass(frozen=True, slots=True)
class SeedingState:
    """What a policy remembers between steps. `memory` holds the window by number of instances;
    `pace` is how much slower remote generation is than the forecast.
    """

    window_s: float
    most_remote: int | None = None
    memory: Mapping[int, float] = field(default_factory=dict)
    train_tokens_per_s: float | None = None
    pace: float = 1.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How the time of a step was spent. `steady`: the number of remote instances never changed."""

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
    """The present state of a step. `forecast` is None until enough is known. `ready_tokens` are of
    complete responses that are not trained yet. `remote_joined` includes instances that still pull
    weights.
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
    """Decides when local engines stop, and whether they start again."""

    def start(self) -> SeedingState:
        """The state before the first step."""

    def window_s(self, state: SeedingState, remote: int) -> float:
        """The seeding window of a step that begins with `remote` instances."""

    def stop_reason(self, state: SeedingState, view: SeedingView) -> str | None:
        """Why the local engines should stop now, or None if they should continue."""

    def resume_reason(self, state: SeedingState, view: SeedingView) -> str | None:
        """Why the local engines should use a waiting trainer's devices again, or None."""

    def learn_from_step(self, state: SeedingState, times: StepTimes) -> SeedingState: ...

    def most_remote(self, state: SeedingState, view: SeedingView) -> int | None:
        """How many remote instances a step like this can use; None for any number."""


def count_useful_remote(times: StepTimes, window_s: float) -> int | None:
    """The number of instances with which rollout takes no longer than training (Algorithm 1, line
    10).
    """
    if times.train_s <= 0:
        return None
    work = times.remote_s * times.mean_remote + window_s * times.local_engines
    return max(1, math.ceil(work / times.train_s))


@dataclass(frozen=True, slots=True)
class ColocatedSeeding:
    """Baseline: the training nodes run all turns and then train; remote instances are not used."""

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
    """RLBoost: a time window, fixed when the step begins. It grows or shrinks by how long the
    trainer and the instances waited in the last step. `initial_s` and `eta` are those of the
    authors' published manager. Without `seeds` the window is 0. Without `remembers` the window that
    a number of instances had before is not used again.
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
