"""Executes the seeding policy: when local engines stop for the trainer, and when they return."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slackwater.control.rollout import events
from slackwater.control.rollout.commands import EndSeeding, LimitInstances, ResumeSeeding
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.control.rollout.manager_state import ManagerState
from slackwater.control.rollout.membership import Membership
from slackwater.control.steps.events import SeedingChanged
from slackwater.control.timer import SetTimer
from slackwater.model.ids import JobId
from slackwater.policy.rollout.forecast import Forecast, RemainingTurns
from slackwater.policy.rollout.seeding import SeedingState, SeedingView, StepTimes

SEEDING = "rollout-seeding:"


@dataclass(slots=True)
class JobStep:
    """A job's present step. `remote_seconds` integrates the number of remote instances."""

    state: SeedingState
    seeding: bool = False
    began_s: float = 0.0
    window_s: float = 0.0
    done_tokens_before: int = 0
    turns: int = 0
    closed_turns_goal: int = 0
    remote_seconds: float = 0.0
    sampled_s: float = 0.0
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
    """Runs the seeding policy for every job that has begun a step."""

    def __init__(self, state: ManagerState, membership: Membership) -> None:
        self._state = state
        self._membership = membership
        self.steps: dict[JobId, JobStep] = {}

    def begin_step(self, event: events.StepBegan) -> None:
        """Local engines seed from now on."""
        policy = self._state.settings.seeding
        before = self.steps.get(event.job)
        step = JobStep(before.state if before else policy.start(), seeding=True, running=True)
        self.steps[event.job] = step
        remote = len(self._remote(event.job))
        work = self._state.work[event.job]
        work.steps = True
        step.began_s = step.sampled_s = step.seeding_since_s = event.now_s
        step.turns = event.turns
        step.closed_turns_goal = work.closed_turns + event.turns
        step.counts = (remote, remote)
        step.done_tokens_before = work.done_tokens
        step.window_s = policy.window_s(step.state, remote)
        self._state.out.append(SetTimer(SEEDING + event.job, event.now_s + step.window_s))

    def watch(self) -> None:
        for job, step in self.steps.items():
            if step.running:
                self._sample_remote(job, step)
                self._limit(job, step)
                self.consider(job)

    def reconsider(self) -> None:
        """An instance became usable: seeding may end."""
        for job, step in self.steps.items():
            if step.seeding and self._state.turns:
                self.consider(job)

    def _limit(self, job: JobId, step: JobStep) -> None:
        """Once a step, when its turns are known: limit the remote instances to a useful number."""
        if step.limited or not self._state.turns:
            return
        step.limited = True
        view = self._view(job, step)
        most = self._state.settings.seeding.most_remote(step.state, view)
        if most is not None:
            self._state.out.append(LimitInstances(job, most))

    def end_finished(self) -> None:
        """After every event: consider ending seeding where the last turn of a step has ended."""
        for job, step in self.steps.items():
            if step.seeding and (
                self._state.work[job].closed_turns >= step.closed_turns_goal
                or (step.wanted_since_s is not None and not self._has_turns(job))
            ):
                self.consider(job)

    def consider(self, job: JobId) -> None:
        """End seeding if the policy says so, or if the trainer has waited for its devices."""
        step = self.steps.get(job)
        if step is None or not step.seeding:
            return
        view = self._view(job, step)
        reason = self._state.settings.seeding.stop_reason(step.state, view)
        reason = reason or self._claim(job, step)
        if reason is not None:
            self._end(job, step, reason)

    def _claim(self, job: JobId, step: JobStep) -> str | None:
        """Why a waiting trainer gets its devices whatever the policy says, or None."""
        if step.wanted_since_s is None:
            return None
        if not self._has_turns(job):
            return "the trainer has work and no turn is live"
        waited_s = self._state.now_s - step.wanted_since_s
        if waited_s >= self._state.settings.trainer_patience_s:
            return f"the trainer has waited {waited_s:.0f} s"
        return None

    def _has_turns(self, job: JobId) -> bool:
        return self._state.work[job].live_turns > 0

    def _end(self, job: JobId, step: JobStep, reason: str) -> None:
        step.seeding = False
        step.wanted_since_s = None
        step.seeded_s += self._state.now_s - step.seeding_since_s
        local = self._local(job)
        step.local_engines = max(step.local_engines, len(local))
        for record in local:
            if not self._seeds_on(record):  # for another job
                self._membership.hand_over(record, reason)
        self._state.out += [SeedingChanged(self._state.now_s, job, False), EndSeeding(job, reason)]

    def claim_for_trainer(self, event: events.TrainerWanted) -> None:
        """The trainer gets its devices when seeding ends, no turn is live or its patience ends."""
        step = self.steps.get(event.job)
        if step is not None and step.seeding and step.wanted_since_s is None:
            step.wanted_since_s = event.now_s
            self.consider(event.job)

    def consider_resuming(self, event: events.TrainerWaits) -> None:
        """Start seeding again if the waiting trainer's devices would help."""
        step = self.steps.get(event.job)
        if step is None or step.seeding or not step.running:
            return
        step.trained_tokens = event.trained_tokens
        if event.train_s > 0:
            step.train_tokens_per_s = event.trained_tokens / event.train_s
        view = self._view(event.job, step)
        reason = self._state.settings.seeding.resume_reason(step.state, view)
        if reason is not None:
            step.seeding = True
            step.seeding_since_s = event.now_s
            resumed = SeedingChanged(event.now_s, event.job, True)
            self._state.out += [resumed, ResumeSeeding(event.job, reason)]

    def end_step(self, event: events.StepEnded) -> None:
        step = self.steps.get(event.job)
        if step is None or not step.running:
            return
        self._sample_remote(event.job, step)
        step.running = step.seeding = False
        length_s = max(event.now_s - step.began_s, 1e-9)
        last_done_s = self._state.work[event.job].closed_s
        times = StepTimes(
            event.train_s,
            event.trainer_wait_s,
            event.remote_wait_s,
            max(last_done_s - step.began_s, 0.0),
            step.seeded_s,
            event.trained_tokens,
            step.remote_seconds / length_s,
            len(self._remote(event.job)),
            step.local_engines,
            step.counts[0] == step.counts[1],
            length_s,
        )
        step.state = self._state.settings.seeding.learn_from_step(step.state, times)

    def drop_job(self, event: events.StepDropped) -> None:
        """The job ended: free its local engines and forget its step."""
        step = self.steps.get(event.job)
        if step is None:
            return
        if step.seeding:
            self._end(event.job, step, "the job ended")
        del self.steps[event.job]
        self._state.work[event.job].steps = False
        self._state.forget_work(event.job)

    def _sample_remote(self, job: JobId, step: JobStep) -> None:
        remote, now_s = len(self._remote(job)), self._state.now_s
        step.remote_seconds += remote * (now_s - step.sampled_s)
        step.sampled_s = now_s
        step.counts = (min(step.counts[0], remote), max(step.counts[1], remote))

    def _remote(self, job: JobId) -> list[InstanceRecord]:
        return [r for r in self._instances_of(job) if not (r.is_local or r.draining or r.stalled)]

    def _instances_of(self, job: JobId) -> list[InstanceRecord]:
        models = self._state.work[job].base_models
        return [r for r in self._state.instances if r.spec.serves_any(job, models)]

    def _seeds_on(self, record: InstanceRecord) -> bool:
        """Whether any job seeds on the local engine."""
        work = self._state.work
        return any(
            step.seeding and record.spec.serves_any(job, work[job].base_models)
            for job, step in self.steps.items()
        )

    def _view(self, job: JobId, step: JobStep) -> SeedingView:
        state = self._state
        remote = self._remote(job)
        turns = [turn for turn in state.turns.values() if turn.spec.job == job]
        versions = {turn.spec.version for turn in turns}
        ready = [r for r in remote if r.load.accepting and (not versions or versions & r.versions)]
        made = np.array([len(turn.tokens) for turn in turns], dtype=np.float64)
        context = np.array([turn.context_tokens for turn in turns], dtype=np.float64)
        known = len(state.lengths) > 0
        work = state.work[job]
        return SeedingView(
            elapsed_s=state.now_s - step.began_s,
            window_s=step.window_s,
            remote_ready=len(ready),
            remote_joined=len(remote),
            local_engines=max(step.local_engines, len(self._local(job))),
            turns=step.turns,
            turns_left=max(len(turns), step.closed_turns_goal - work.closed_turns),
            ready_tokens=float(work.done_tokens - step.done_tokens_before - step.trained_tokens),
            remaining=RemainingTurns(
                state.lengths.sample_remaining(made) if known else made, context
            ),
            forecast=self._forecast(step, context - made) if known else None,
        )

    def _local(self, job: JobId) -> list[InstanceRecord]:
        return [record for record in self._instances_of(job) if record.is_local]

    def _forecast(self, step: JobStep, prompts: NDArray[np.float64]) -> Forecast | None:
        model = self._state.step_time.model
        rate = step.state.train_tokens_per_s or step.train_tokens_per_s
        kv_tokens = [record.spec.kv_tokens for record in self._state.instances]
        if model is None or rate is None or not kv_tokens or len(prompts) == 0:
            return None
        kv_mean = int(np.mean(kv_tokens))
        speeds = [1.0 / record.load.slowness for record in self._state.instances]
        model = model.scale(1.0 / float(np.mean(speeds)))
        return Forecast(model, kv_mean, rate, float(prompts.mean()), step.state.pace)
