"""The job registry: the stage of every job from submission to end, and what it has used.

    submitted -> profiling -> placed | held | refused -> running -> finished | failed | stopped

A job with a known profile skips profiling. A crash or a lost node makes a job a new arrival at its
last complete iteration. After its end, messages only change its account. A job with a driver ends
with the driver (`drivers.py`); a job with neither driver nor session ends after a long silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from slackwater.control.jobs import events
from slackwater.control.jobs.commands import JobCommand, PlaceJob, ProfileJob
from slackwater.control.jobs.driver_events import DriverDue, DriverUndue
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobAccount, JobStage

_MOST_JOBS = 10_000  # above this the oldest that are over are forgotten


@dataclass(slots=True)
class RegisteredJob:
    """One job. A `driven` job was submitted with a driver. `active_s` is its last sign of life."""

    job: JobId
    tenant: TenantId
    since_s: float
    stage: JobStage = JobStage.SUBMITTED
    reason: str = ""
    profile: JobProfile | None = None
    iterations_done: int = 0
    crashes: int = 0
    account: JobAccount = field(default_factory=JobAccount)
    terms: JobTerms | None = None
    driven: bool = False
    active_s: float = 0.0
    open_turns: int = 0


class JobRegistry:
    """See the module. With `profiles`, jobs with terms are profiled before they are placed."""

    def __init__(self, *, profiles: bool = False, idle_after_s: float = 600.0) -> None:
        self._profiles = profiles
        self._idle_after_s = idle_after_s
        self._jobs: dict[JobId, RegisteredJob] = {}
        self._out: list[JobCommand | events.JobEnded] = []

    def handle(self, event: events.JobEvent) -> Sequence[JobCommand | events.JobEnded]:
        if isinstance(event, TurnOpened | TurnClosed | events.JobTrained):  # the most frequent
            self._record_usage(event)
            return ()
        self._out = []
        match event:
            case events.JobSubmitted():
                self._submit(event)
            case events.JobAdopted():
                self._adopt(event)
            case events.IdleJobsSought():
                self._end_idle(event)
            case events.JobHeard():
                if (entry := self._jobs.get(event.job)) is not None:
                    entry.active_s = event.now_s
            case _:
                entry = self._jobs.get(event.job)
                if entry is not None and not entry.stage.over:
                    self._continue(entry, event)
        return self._out

    def _continue(self, entry: RegisteredJob, event: events.ProgressEvent) -> None:
        match event:
            case events.JobProfiled(_, _, profile):
                if entry.stage is JobStage.PROFILING:
                    entry.profile = profile
                    self._arrive(entry)
            case events.JobAnswered(_, _, answer, reason):
                unstarted = (JobStage.SUBMITTED, JobStage.HELD, JobStage.PLACED)
                displaced = entry.stage is JobStage.RUNNING and answer == "held"
                if entry.stage in unstarted or displaced:
                    entry.stage, entry.reason = JobStage(answer), reason
                    self._tell_driver(entry, event.now_s)
            case events.IterationDone():
                if entry.stage in (JobStage.RUNNING, JobStage.PLACED, JobStage.PROFILING):
                    entry.iterations_done += 1
            case events.JobCrashed(_, _, reason):
                entry.crashes += 1
                if entry.stage is JobStage.PROFILING and entry.terms is not None:
                    self._profile(entry, entry.terms, event.now_s)
                else:
                    self._arrive(entry)
                entry.reason = reason
            case events.JobEnded(_, _, outcome, reason):
                entry.stage, entry.reason = JobStage(outcome), reason
                self._tell_driver(entry, event.now_s)
                if len(self._jobs) > _MOST_JOBS:
                    self._forget_oldest()
            case _:
                assert_never(event)

    # ---- queries ----
    def entries(self) -> list[RegisteredJob]:
        """Every job, oldest first; the caller must not change them."""
        return list(self._jobs.values())

    def find(self, job: JobId) -> RegisteredJob | None:
        return self._jobs.get(job)

    # ---- life ----
    def _submit(self, event: events.JobSubmitted) -> None:
        entry = self._jobs.get(event.job)
        if entry is not None and not entry.stage.over:
            if event.driven and not entry.driven:
                entry.driven = True
                self._tell_driver(entry, event.now_s)
            return  # another session of the same run
        if entry is not None and entry.driven and not event.driven:
            return  # a late session of a driver that has ended
        if entry is None:
            entry = self._jobs[event.job] = RegisteredJob(event.job, event.tenant, event.now_s)
        entry.profile = event.profile or entry.profile
        if event.terms is not None or entry.stage is not JobStage.STOPPED:
            entry.terms = event.terms  # a stopped job resumes with its own terms
        entry.driven = event.driven
        entry.iterations_done = max(event.iterations_done, entry.iterations_done)
        entry.active_s = event.now_s
        if entry.profile is None and self._profiles and entry.terms is not None:
            self._profile(entry, entry.terms, event.now_s)
        else:
            self._arrive(entry)

    def _adopt(self, event: events.JobAdopted) -> None:
        if event.job in self._jobs:
            if self._jobs[event.job].account == JobAccount():
                self._jobs[event.job].account = replace(event.account)
            return
        entry = RegisteredJob(event.job, event.tenant, event.now_s, event.stage, event.reason)
        entry.account = replace(event.account)  # the event stays as it is
        entry.terms, entry.driven = event.terms, event.driven
        entry.iterations_done, entry.crashes = event.iterations_done, event.crashes
        self._jobs[event.job] = entry

    def _profile(self, entry: RegisteredJob, terms: JobTerms, now_s: float) -> None:
        entry.stage, entry.reason = JobStage.PROFILING, "its cycle is not known yet"
        self._out.append(ProfileJob(entry.job, terms))
        self._tell_driver(entry, now_s)

    def _arrive(self, entry: RegisteredJob) -> None:
        entry.stage, entry.reason = JobStage.SUBMITTED, ""
        self._out.append(
            PlaceJob(
                entry.job,
                entry.profile,
                entry.iterations_done,
                entry.crashes,
                entry.terms,
                driven=entry.driven,
            )
        )

    def _tell_driver(self, entry: RegisteredJob, now_s: float) -> None:
        if not entry.driven:
            return
        if entry.stage in (JobStage.PLACED, JobStage.PROFILING, JobStage.RUNNING):
            self._out.append(DriverDue(now_s, entry.job))
        elif entry.stage.over:
            self._out.append(DriverUndue(now_s, entry.job, entry.stage, entry.reason))

    def _end_idle(self, event: events.IdleJobsSought) -> None:
        """The job of an API key, or of a killed program, ends only by silence."""
        for entry in self._jobs.values():
            if entry.stage.over or entry.driven or entry.open_turns:
                continue
            idle_s = event.now_s - entry.active_s
            if entry.job not in event.attended and idle_s >= self._idle_after_s:
                reason = f"no turn, operation or heartbeat for {idle_s:.0f} s"
                self._out.append(events.JobEnded(event.now_s, entry.job, "stopped", reason))

    # ---- accounts ----
    def _record_usage(self, event: events.UsageEvent) -> None:
        entry = self._jobs.get(event.job)
        if entry is None:
            return
        if entry.stage is JobStage.PLACED:
            entry.stage = JobStage.RUNNING
        entry.active_s = event.now_s
        account = entry.account
        match event:
            case TurnOpened():
                entry.open_turns += 1
            case TurnClosed():
                entry.open_turns = max(entry.open_turns - 1, 0)
                account.engine_s += event.device_s
                account.turns += 1
                account.failed_turns += not event.completed
                account.prompt_tokens += event.prompt_tokens
                account.tokens += event.tokens
                account.turns_waited_s += event.waited_s
            case events.JobTrained(_, _, trainer_s, waited_s):
                account.trainer_s += trainer_s
                account.operations += 1
                account.operations_waited_s += waited_s

    def _forget_oldest(self) -> None:
        oldest = next((job for job, entry in self._jobs.items() if entry.stage.over), None)
        if oldest is not None:
            del self._jobs[oldest]

    def check_integrity(self) -> None:
        for job, entry in self._jobs.items():
            assert entry.job == job
            account = entry.account
            assert account.failed_turns <= account.turns
            assert min(account.engine_s, account.trainer_s, account.turns_waited_s) >= -1e-6
            if self._profiles and entry.stage in (JobStage.PLACED, JobStage.RUNNING):
                assert entry.profile is not None or entry.terms is None, (
                    f"{job} was placed without a profile"
                )
            if entry.stage in (JobStage.HELD, JobStage.REFUSED):
                assert entry.reason, f"{job} has no reason why it does not run"
