"""Carries out the seeding policy: when local engines stop for the trainer, and when they come back."""

from dataclasses import dataclass

import numpy as np

from slackwater.control.rollout.books import Books, Out
from slackwater.control.rollout.commands import (
    EndSeeding,
    LimitInstances,
    ResumeSeeding,
    SetTimer,
)
from slackwater.control.rollout.events import StepBegan, StepEnded, TrainerWaits
from slackwater.control.rollout.fleet import InstanceRecord
from slackwater.control.rollout.membership import Membership
from slackwater.model.ids import JobId
from slackwater.policy.seeding import SeedingState, SeedingView, StepTimes

SEEDING = "rollout-seeding:"


@dataclass(slots=True)
class JobStep:
    """A job's present step. The remote count is averaged over the moments it was looked at."""

    state: SeedingState
    seeding: bool = False
    began_s: float = 0.0
    window_s: float = 0.0
    done_tokens_before: int = 0
    closed_turns_goal: int = 0
    remote_seconds: float = 0.0
    looked_s: float = 0.0
    counts: tuple[int, int] = (0, 0)
    ended_s: float | None = None
    predicted_remote_s: float | None = None
    local_engines: int = 0
    running: bool = False


class SeedingDesk:
    """One `JobStep` per job that has ever begun one."""

    def __init__(self, books: Books, membership: Membership) -> None:
        self._books = books
        self._membership = membership
        self._steps: dict[JobId, JobStep] = {}

    def began(self, event: StepBegan, out: Out) -> None:
        """Local engines seed from now on."""
        policy = self._books.settings.seeding
        before = self._steps.get(event.job)
        step = JobStep(before.state if before else policy.start(), seeding=True, running=True)
        self._steps[event.job] = step
        remote = len(self._remote(event.job))
        work = self._books.work_of(event.job)
        step.began_s = step.looked_s = event.now_s
        step.closed_turns_goal = work.closed_turns + event.turns
        step.counts = (remote, remote)
        step.done_tokens_before = work.done_tokens
        step.window_s = policy.window_s(step.state, remote)
        out.append(SetTimer(SEEDING + event.job, event.now_s + step.window_s))

    def timer(self, name: str, now_s: float, out: Out) -> None:
        """The window of a job is over."""
        self._consider(JobId(name.removeprefix(SEEDING)), now_s, out)

    def watch(self, now_s: float, out: Out) -> None:
        """Look at every running step."""
        for job, step in self._steps.items():
            if step.running:
                self._look(job, step, now_s)
                self._consider(job, now_s, out)

    def settle(self, now_s: float, out: Out) -> None:
        """After every event: if the last turn of a step has ended, seeding ends with it."""
        for job, step in self._steps.items():
            if step.seeding and self._books.work_of(job).closed_turns >= step.closed_turns_goal:
                self._consider(job, now_s, out)

    def _consider(self, job: JobId, now_s: float, out: Out) -> None:
        step = self._steps.get(job)
        if step is None or not step.seeding:
            return
        view = self._view(job, step, now_s)
        reason = self._books.settings.seeding.ends(step.state, view)
        if reason is not None:
            self._end(job, step, view, reason, now_s, out)

    def _end(
        self, job: JobId, step: JobStep, view: SeedingView, reason: str, now_s: float, out: Out
    ) -> None:
        step.seeding = False
        if view.turns_left and step.ended_s is None:
            step.ended_s = now_s
            if view.remote_tokens_per_s:
                rate = view.remote_tokens_per_s * step.state.remote_share
                step.predicted_remote_s = view.left_tokens / rate
        local = [record for record in self._books.fleet if record.local and record.serves(job)]
        step.local_engines = max(step.local_engines, len(local))
        for record in local:
            self._membership.hand_over(record, reason, now_s, out)
        out.append(EndSeeding(job, reason))

    def trainer_waits(self, event: TrainerWaits, out: Out) -> None:
        """Perhaps the waiting trainer's devices can help."""
        step = self._steps.get(event.job)
        if step is None or step.seeding or not step.running:
            return
        view = self._view(event.job, step, event.now_s)
        reason = self._books.settings.seeding.resumes(step.state, view)
        if reason is not None:
            step.seeding = True
            out.append(ResumeSeeding(event.job, reason))

    def ended(self, event: StepEnded, out: Out) -> None:
        """Learn from the step."""
        step = self._steps.get(event.job)
        if step is None or not step.running:
            return
        self._look(event.job, step, event.now_s)
        step.running = step.seeding = False
        length_s = max(event.now_s - step.began_s, 1e-9)
        last_done_s = self._books.work_of(event.job).closed_s
        actual_s = None if step.ended_s is None else last_done_s - step.ended_s
        times = StepTimes(
            event.train_s,
            event.trainer_wait_s,
            event.remote_wait_s,
            max(last_done_s - step.began_s, 0.0),
            event.trained_tokens,
            step.remote_seconds / length_s,
            len(self._remote(event.job)),
            step.local_engines,
            step.counts[0] == step.counts[1],
            step.predicted_remote_s,
            actual_s,
        )
        step.state = self._books.settings.seeding.after_step(step.state, times)
        if step.state.most_remote is not None:
            out.append(LimitInstances(event.job, step.state.most_remote))

    def _look(self, job: JobId, step: JobStep, now_s: float) -> None:
        remote = len(self._remote(job))
        step.remote_seconds += remote * (now_s - step.looked_s)
        step.looked_s = now_s
        step.counts = (min(step.counts[0], remote), max(step.counts[1], remote))

    def _remote(self, job: JobId) -> list[InstanceRecord]:
        return [r for r in self._books.fleet.accepting_for(job) if not r.local]

    def _view(self, job: JobId, step: JobStep, now_s: float) -> SeedingView:
        books = self._books
        remote = self._remote(job)
        version = books.published.get(job)
        ready = [r for r in remote if r.load.accepting and (not version or version in r.versions)]
        made = np.array(
            [len(turn.tokens) for turn in books.turns.values() if turn.spec.job == job],
            dtype=np.float64,
        )
        left = books.lengths.expected_left(made) if len(books.lengths) else made * 0
        left_tokens = float(left.sum())
        work = books.work_of(job)
        done = work.done_tokens - step.done_tokens_before
        longest = books.lengths.longest - float(np.median(made)) if len(made) else 0.0
        locals_ = max(step.local_engines, sum(r.local and r.serves(job) for r in books.fleet))
        return SeedingView(
            elapsed_s=now_s - step.began_s,
            window_s=step.window_s,
            remote_ready=len(ready),
            remote_joined=len(remote),
            turns_left=max(len(made), step.closed_turns_goal - work.closed_turns),
            left_tokens=left_tokens,
            untrained_tokens=done + float(made.sum()) + left_tokens,
            longest_left_tokens=max(longest, 0.0),
            remote_tokens_per_s=self._rate(len(ready), len(made)),
            local_tokens_per_s=self._rate(locals_, len(made)),
            turn_tokens_per_s=books.profile.fastest_turn_rate,
        )

    def _rate(self, instances: int, turns: int) -> float | None:
        """What so many instances make of so many turns, evenly spread."""
        if instances == 0 or turns == 0:
            return None
        rate = self._books.profile.rate(max(1, turns // instances))
        return None if rate is None else rate * instances
