"""Carries out the seeding policy: when local engines stop for the trainer, and when they come back."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slackwater.control.rollout.books import Books, Out
from slackwater.control.rollout.commands import EndSeeding, LimitInstances, ResumeSeeding
from slackwater.control.rollout.events import StepBegan, StepEnded, TrainerWaits, TrainerWanted
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.control.rollout.membership import Membership
from slackwater.control.timer import SetTimer
from slackwater.policy.rollout.forecast import Forecast, Remaining
from slackwater.policy.rollout.seeding import SeedingState, SeedingView, StepTimes

SEEDING = "rollout-seeding:"


@dataclass(slots=True)
class BaseStep:
    """A base model's present step. The remote count is averaged over the moments it was looked at."""

    state: SeedingState
    seeding: bool = False
    began_s: float = 0.0
    window_s: float = 0.0
    done_tokens_before: int = 0
    turns: int = 0
    closed_turns_goal: int = 0
    remote_seconds: float = 0.0
    looked_s: float = 0.0
    counts: tuple[int, int] = (0, 0)
    trained_tokens: int = 0
    train_tokens_per_s: float | None = None
    local_engines: int = 0
    running: bool = False
    limited: bool = False
    seeded_s: float = 0.0
    seeding_since_s: float = 0.0
    wanted_since_s: float | None = None


class Seeding:
    """One `BaseStep` per base model that has ever begun one."""

    def __init__(self, books: Books, membership: Membership) -> None:
        self._books = books
        self._membership = membership
        self._steps: dict[str, BaseStep] = {}

    def began(self, event: StepBegan, out: Out) -> None:
        """Local engines seed from now on."""
        policy = self._books.settings.seeding
        before = self._steps.get(event.base_model)
        step = BaseStep(before.state if before else policy.start(), seeding=True, running=True)
        self._steps[event.base_model] = step
        remote = len(self._remote(event.base_model))
        work = self._books.work_of(event.base_model)
        step.began_s = step.looked_s = step.seeding_since_s = event.now_s
        step.turns = event.turns
        step.closed_turns_goal = work.closed_turns + event.turns
        step.counts = (remote, remote)
        step.done_tokens_before = work.done_tokens
        step.window_s = policy.window_s(step.state, remote)
        out.append(SetTimer(SEEDING + event.base_model, event.now_s + step.window_s))

    def timer(self, name: str, now_s: float, out: Out) -> None:
        """The window of a step is over."""
        self._consider(name.removeprefix(SEEDING), now_s, out)

    def watch(self, now_s: float, out: Out) -> None:
        """Look at every running step."""
        for base, step in self._steps.items():
            if step.running:
                self._look(base, step, now_s)
                self._limit(base, step, now_s, out)
                self._consider(base, now_s, out)

    def reconsider(self, now_s: float, out: Out) -> None:
        """An instance has come: seeding may be over."""
        for base, step in self._steps.items():
            if step.seeding and self._books.turns:
                self._consider(base, now_s, out)

    def _limit(self, base: str, step: BaseStep, now_s: float, out: Out) -> None:
        """Once a step, when its turns are known: how many remote instances are worth having."""
        if step.limited or not self._books.turns:
            return
        step.limited = True
        view = self._view(base, step, now_s)
        most = self._books.settings.seeding.most_remote(step.state, view)
        if most is not None:
            out.append(LimitInstances(base, most))

    def settle(self, now_s: float, out: Out) -> None:
        """After every event: if the last turn of a step has ended, seeding ends with it."""
        for base, step in self._steps.items():
            if step.seeding and (
                self._books.work_of(base).closed_turns >= step.closed_turns_goal
                or (step.wanted_since_s is not None and not self._has_turns(base))
            ):
                self._consider(base, now_s, out)

    def _consider(self, base: str, now_s: float, out: Out) -> None:
        step = self._steps.get(base)
        if step is None or not step.seeding:
            return
        view = self._view(base, step, now_s)
        reason = self._books.settings.seeding.ends(step.state, view)
        reason = reason or self._claim(base, step, now_s)
        if reason is not None:
            self._end(base, step, reason, now_s, out)

    def _claim(self, base: str, step: BaseStep, now_s: float) -> str | None:
        """Why a trainer that wants its devices gets them, whatever the policy says."""
        if step.wanted_since_s is None:
            return None
        if not self._has_turns(base):
            return "the trainer has work and no turn is live"
        waited_s = now_s - step.wanted_since_s
        if waited_s >= self._books.settings.trainer_patience_s:
            return f"the trainer has waited {waited_s:.0f} s"
        return None

    def _has_turns(self, base: str) -> bool:
        return any(turn.spec.base_model == base for turn in self._books.turns.values())

    def _end(self, base: str, step: BaseStep, reason: str, now_s: float, out: Out) -> None:
        step.seeding = False
        step.wanted_since_s = None
        step.seeded_s += now_s - step.seeding_since_s
        local = [record for record in self._books.instances if record.local and record.runs(base)]
        step.local_engines = max(step.local_engines, len(local))
        for record in local:
            self._membership.hand_over(record, reason, now_s, out)
        out.append(EndSeeding(base, reason))

    def trainer_wanted(self, event: TrainerWanted, out: Out) -> None:
        """It gets its devices when seeding ends, when no turn is live, or when its patience does."""
        step = self._steps.get(event.base_model)
        if step is not None and step.seeding and step.wanted_since_s is None:
            step.wanted_since_s = event.now_s
            self._consider(event.base_model, event.now_s, out)

    def trainer_waits(self, event: TrainerWaits, out: Out) -> None:
        """Perhaps the waiting trainer's devices can help."""
        step = self._steps.get(event.base_model)
        if step is None or step.seeding or not step.running:
            return
        step.trained_tokens = event.trained_tokens
        if event.train_s > 0:
            step.train_tokens_per_s = event.trained_tokens / event.train_s
        view = self._view(event.base_model, step, event.now_s)
        reason = self._books.settings.seeding.resumes(step.state, view)
        if reason is not None:
            step.seeding = True
            step.seeding_since_s = event.now_s
            out.append(ResumeSeeding(event.base_model, reason))

    def ended(self, event: StepEnded, out: Out) -> None:
        """Learn from the step."""
        step = self._steps.get(event.base_model)
        if step is None or not step.running:
            return
        self._look(event.base_model, step, event.now_s)
        step.running = step.seeding = False
        length_s = max(event.now_s - step.began_s, 1e-9)
        last_done_s = self._books.work_of(event.base_model).closed_s
        times = StepTimes(
            event.train_s,
            event.trainer_wait_s,
            event.remote_wait_s,
            max(last_done_s - step.began_s, 0.0),
            step.seeded_s,
            event.trained_tokens,
            step.remote_seconds / length_s,
            len(self._remote(event.base_model)),
            step.local_engines,
            step.counts[0] == step.counts[1],
            length_s,
        )
        step.state = self._books.settings.seeding.after_step(step.state, times)

    def _look(self, base: str, step: BaseStep, now_s: float) -> None:
        remote = len(self._remote(base))
        step.remote_seconds += remote * (now_s - step.looked_s)
        step.looked_s = now_s
        step.counts = (min(step.counts[0], remote), max(step.counts[1], remote))

    def _remote(self, base: str) -> list[InstanceRecord]:
        return [r for r in self._books.instances.accepting_for(base) if not r.local]

    def _view(self, base: str, step: BaseStep, now_s: float) -> SeedingView:
        books = self._books
        remote = self._remote(base)
        turns = [turn for turn in books.turns.values() if turn.spec.base_model == base]
        asked = {turn.spec.version for turn in turns}
        ready = [r for r in remote if r.load.accepting and (not asked or asked & r.versions)]
        made = np.array([len(turn.tokens) for turn in turns], dtype=np.float64)
        context = np.array([turn.context_tokens for turn in turns], dtype=np.float64)
        known = len(books.lengths) > 0
        work = books.work_of(base)
        return SeedingView(
            elapsed_s=now_s - step.began_s,
            window_s=step.window_s,
            remote_ready=len(ready),
            remote_joined=len(remote),
            local_engines=max(step.local_engines, self._local(base)),
            turns=step.turns,
            turns_left=max(len(turns), step.closed_turns_goal - work.closed_turns),
            ready_tokens=float(work.done_tokens - step.done_tokens_before - step.trained_tokens),
            remaining=Remaining(books.lengths.sample_left(made) if known else made, context),
            forecast=self._forecast(step, context - made) if known else None,
        )

    def _local(self, base: str) -> int:
        return sum(record.local and record.runs(base) for record in self._books.instances)

    def _forecast(self, step: BaseStep, prompts: NDArray[np.float64]) -> Forecast | None:
        model = self._books.step_time.model
        rate = step.state.train_tokens_per_s or step.train_tokens_per_s
        kv_tokens = [record.spec.kv_tokens for record in self._books.instances]
        if model is None or rate is None or not kv_tokens or len(prompts) == 0:
            return None
        kv_mean = int(np.mean(kv_tokens))
        speeds = [1.0 / record.load.slowness for record in self._books.instances]
        model = model.times(1.0 / float(np.mean(speeds)))
        return Forecast(model, kv_mean, rate, float(prompts.mean()), step.state.pace)
