"""The job book: where every job stands between its submission and its end, and what it has used.

    submitted -> profiling -> placed | held | refused -> running -> finished | failed | stopped

A job whose profile is known skips profiling. A crash or a lost node makes it a new arrival at its last complete iteration.
Messages that come late (of a job that is over, or not known) change nothing but the account.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from slackwater.control.jobs import commands as do
from slackwater.control.jobs import events as on
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job import JobProfile
from slackwater.model.job_life import JobAccount, JobStage

Out = list[do.JobCommand]

_REMEMBERED = 10_000  # jobs that are over; the oldest are forgotten


@dataclass(slots=True)
class JobEntry:
    """One job. `iterations_done` are complete."""

    job: JobId
    tenant: TenantId
    since_s: float
    stage: JobStage = JobStage.SUBMITTED
    reason: str = ""
    profile: JobProfile | None = None
    iterations_done: int = 0
    crashes: int = 0
    account: JobAccount = field(default_factory=JobAccount)


class JobBook:
    """See the module. `profiles` off: jobs without a profile are placed at once, to share what there is."""

    def __init__(self, *, profiles: bool = False) -> None:
        self._profiles = profiles
        self._jobs: dict[JobId, JobEntry] = {}

    def handle(self, event: on.JobEvent) -> Sequence[do.JobCommand]:
        """Take one event; return what is to be done, in order."""
        out: Out = []
        match event:
            case on.JobSubmitted():
                self._submitted(event, out)
            case on.JobAdopted(now_s, job, tenant, account):
                if job not in self._jobs:
                    stopped = JobStage.STOPPED
                    self._jobs[job] = JobEntry(job, tenant, now_s, stopped, account=account)
            case on.JobWorked():
                self._worked(event)
            case on.JobTrained():
                self._trained(event)
            case _:
                entry = self._jobs.get(event.job)
                if entry is not None and not entry.stage.over:
                    self._goes_on(entry, event, out)
        return out

    def _goes_on(
        self,
        entry: JobEntry,
        event: on.JobProfiled | on.JobAnswered | on.IterationDone | on.JobCrashed | on.JobEnded,
        out: Out,
    ) -> None:
        match event:
            case on.JobProfiled(_, _, profile):
                if entry.stage is JobStage.PROFILING:
                    entry.profile = profile
                    self._arrive(entry, out)
            case on.JobAnswered(_, _, answer, reason):
                if entry.stage in (JobStage.SUBMITTED, JobStage.HELD, JobStage.PLACED):
                    entry.stage, entry.reason = JobStage(answer), reason
            case on.IterationDone():
                if entry.stage in (JobStage.RUNNING, JobStage.PLACED):
                    entry.iterations_done += 1
            case on.JobCrashed(_, _, reason):
                if entry.stage is not JobStage.PROFILING:
                    entry.crashes += 1
                    entry.reason = reason
                    self._arrive(entry, out)
            case on.JobEnded(_, _, outcome, reason):
                entry.stage, entry.reason = JobStage(outcome), reason
                self._forget_some()
            case _:
                assert_never(event)

    # ---- questions ----
    def entries(self) -> list[JobEntry]:
        """Every job, oldest first; the caller must not change them."""
        return list(self._jobs.values())

    def find(self, job: JobId) -> JobEntry | None:
        return self._jobs.get(job)

    # ---- life ----
    def _submitted(self, event: on.JobSubmitted, out: Out) -> None:
        entry = self._jobs.get(event.job)
        if entry is not None and not entry.stage.over:
            return  # another session of the same run
        if entry is None:
            entry = self._jobs[event.job] = JobEntry(event.job, event.tenant, event.now_s)
        entry.profile = event.profile or entry.profile
        if entry.profile is None and self._profiles:
            entry.stage, entry.reason = JobStage.PROFILING, "its cycle is not known yet"
            out.append(do.ProfileJob(event.job))
        else:
            self._arrive(entry, out)

    def _arrive(self, entry: JobEntry, out: Out) -> None:
        entry.stage = JobStage.SUBMITTED
        out.append(do.PlaceJob(entry.job, entry.profile, entry.iterations_done, entry.crashes))

    # ---- accounts ----
    def _worked(self, event: on.JobWorked) -> None:
        entry = self._jobs.get(event.job)
        if entry is None:
            return
        if entry.stage is JobStage.PLACED:
            entry.stage = JobStage.RUNNING
        if not event.turns:
            return
        had = entry.account
        entry.account = replace(
            had,
            engine_s=had.engine_s + event.engine_s,
            turns=had.turns + event.turns,
            failed_turns=had.failed_turns + (0 if event.completed else event.turns),
            prompt_tokens=had.prompt_tokens + event.prompt_tokens,
            tokens=had.tokens + event.tokens,
            turns_waited_s=had.turns_waited_s + event.waited_s,
        )

    def _trained(self, event: on.JobTrained) -> None:
        entry = self._jobs.get(event.job)
        if entry is None:
            return
        if entry.stage is JobStage.PLACED:
            entry.stage = JobStage.RUNNING
        had = entry.account
        entry.account = replace(
            had,
            trainer_s=had.trainer_s + event.trainer_s,
            operations=had.operations + 1,
            operations_waited_s=had.operations_waited_s + event.waited_s,
        )

    def _forget_some(self) -> None:
        if len(self._jobs) > _REMEMBERED:
            gone = next((job for job, entry in self._jobs.items() if entry.stage.over), None)
            if gone is not None:
                del self._jobs[gone]

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for job, entry in self._jobs.items():
            assert entry.job == job
            account = entry.account
            assert account.failed_turns <= account.turns
            assert min(account.engine_s, account.trainer_s, account.turns_waited_s) >= -1e-6
            if self._profiles and entry.stage in (JobStage.PLACED, JobStage.RUNNING):
                assert entry.profile is not None, f"{job} was placed without a profile"
            if entry.stage in (JobStage.HELD, JobStage.REFUSED):
                assert entry.reason, f"{job} was not told why it does not run"
