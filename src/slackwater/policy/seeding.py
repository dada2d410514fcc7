"""How long training nodes roll out themselves at the start of a step (RLBoost 4.1, Algorithm 1).

Each step begins with local engines generating ("seeding"); then they give way to the trainer, while the
remote instances go on with the unfinished turns. Pure: state and view in, decision or new state out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SeedingState:
    """What is carried from step to step. `memory` is the window that suited each number of instances.

    `train_tokens_per_s` and `remote_share` (how much of the predicted remote rate was reached) are learned.
    """

    window_s: float
    most_remote: int | None = None
    memory: Mapping[int, float] = field(default_factory=dict)
    train_tokens_per_s: float | None = None
    remote_share: float = 1.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a finished step's time went; `steady` if the number of remote instances never changed."""

    train_s: float
    trainer_wait_s: float
    remote_wait_s: float
    remote_s: float
    trained_tokens: int
    mean_remote: float
    remote_now: int
    local_engines: int
    steady: bool
    predicted_remote_s: float | None = None
    actual_remote_s: float | None = None


@dataclass(frozen=True, slots=True)
class SeedingView:
    """The step at this moment. Rates are what the remote instances could do with all turns that are left."""

    elapsed_s: float
    window_s: float
    remote_ready: int
    remote_joined: int
    turns_left: int
    left_tokens: float
    untrained_tokens: float
    longest_left_tokens: float
    remote_tokens_per_s: float | None
    local_tokens_per_s: float | None
    turn_tokens_per_s: float | None


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


def _most_remote(times: StepTimes, window_s: float) -> int | None:
    """The number of instances with which rollout takes no longer than training (Algorithm 1, line 10)."""
    if times.train_s <= 0:
        return None
    work = times.remote_s * times.mean_remote + window_s * times.local_engines
    return max(1, round(work / times.train_s))


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


@dataclass(frozen=True, slots=True)
class AdaptiveWindow:
    """RLBoost: a window of time, moved by what trainer and instances waited in the last step.

    Without `seeds` the window is always 0 (all turns go to remote instances if there are any); without
    `remembers` the window is not looked up when a number of instances returns.
    """

    initial_s: float = 60.0
    eta: float = 2.0
    seeds: bool = True
    remembers: bool = True

    def start(self) -> SeedingState:
        return SeedingState(window_s=self.initial_s if self.seeds else 0.0)

    def window_s(self, state: SeedingState, remote: int) -> float:
        if self.remembers and self.seeds:
            return state.memory.get(remote, state.window_s)
        return state.window_s

    def ends(self, state: SeedingState, view: SeedingView) -> str | None:
        if view.turns_left == 0:
            return "all turns are done"
        if view.remote_ready == 0:
            return None
        window_s = min(view.window_s, self.window_s(state, view.remote_joined))
        if view.elapsed_s >= window_s:
            return f"the window of {window_s:.0f} s is over"
        return None

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
        return SeedingState(window_s, most, memory)


@dataclass(frozen=True, slots=True)
class BalancedFinish:
    """Stop seeding as soon as remote instances can finish the rest no later than the trainer can train it.

    The balance that the adaptive window approaches over steps, found inside each step from the turns that
    are left, the lengths seen, and the rates measured; so a loss or a gain of instances is answered at once.
    The window is the fallback until rates are known. A trainer that waits takes part again when that
    saves more than switching costs.
    """

    fallback: AdaptiveWindow = AdaptiveWindow()
    switch_s: float = 4.0
    learning: float = 0.5

    def start(self) -> SeedingState:
        return self.fallback.start()

    def window_s(self, state: SeedingState, remote: int) -> float:
        return self.fallback.window_s(state, remote)

    def ends(self, state: SeedingState, view: SeedingView) -> str | None:
        if view.turns_left == 0:
            return "all turns are done"
        if view.remote_ready == 0:
            return None
        remote_s, train_s = self._remote_s(state, view), self._train_s(state, view)
        if remote_s is None or train_s is None:
            return self.fallback.ends(state, view)
        if remote_s <= train_s + self.switch_s:
            return f"the rest takes {remote_s:.0f} s remotely and {train_s:.0f} s to train"
        return None

    def resumes(self, state: SeedingState, view: SeedingView) -> str | None:
        if view.turns_left == 0:
            return None
        if view.remote_joined == 0:
            return "no remote instance is left"
        remote_s, train_s = self._remote_s(state, view), self._train_s(state, view)
        if remote_s is None or train_s is None or not view.local_tokens_per_s:
            return None
        together = (view.remote_tokens_per_s or 0.0) + view.local_tokens_per_s
        saved_s = remote_s - view.left_tokens / (together * state.remote_share)
        if remote_s > train_s + 4 * self.switch_s and saved_s > 4 * self.switch_s:
            return f"saves {saved_s:.0f} of {remote_s:.0f} s"
        return None

    def after_step(self, state: SeedingState, times: StepTimes) -> SeedingState:
        learned = self.fallback.after_step(state, times)
        rate, share = state.train_tokens_per_s, state.remote_share
        if times.train_s > 0 and times.trained_tokens > 0:
            seen = times.trained_tokens / times.train_s
            rate = seen if rate is None else rate + self.learning * (seen - rate)
        if times.predicted_remote_s and times.actual_remote_s and times.steady:
            seen = share * times.predicted_remote_s / times.actual_remote_s
            share = min(max(share + self.learning * (seen - share), 0.2), 2.0)
        return replace(learned, train_tokens_per_s=rate, remote_share=share)

    def _remote_s(self, state: SeedingState, view: SeedingView) -> float | None:
        if not view.remote_tokens_per_s or not view.turn_tokens_per_s:
            return None
        shared_s = view.left_tokens / (view.remote_tokens_per_s * state.remote_share)
        return max(shared_s, view.longest_left_tokens / view.turn_tokens_per_s)

    @staticmethod
    def _train_s(state: SeedingState, view: SeedingView) -> float | None:
        if state.train_tokens_per_s is None:
            return None
        return view.untrained_tokens / state.train_tokens_per_s
