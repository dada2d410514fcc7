"""The driver registry: one process at a time for every submitted job, from first start to last end.

    waiting -> running -> over
       ^          |  \\-> leaving -> over
       \\-- crash -/

A driver waits until its job has a place. Exit status 0 finishes the job. A crash makes the job a
new arrival (`JobCrashed`), started again after a backoff; after `MOST_CRASHES` in a row without a
complete iteration the job has failed. An end while the control plane was down does not count as a
crash. The driver registry emits events of the job registry.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, assert_never

from slackwater.control.jobs.commands import (
    DriverCommand,
    EndDriver,
    KeepDriver,
    StartDriver,
)
from slackwater.control.jobs.driver_events import (
    DriverAdopted,
    DriverDue,
    DriverEnded,
    DriverEvent,
    DriverSubmitted,
    DriverUndue,
    ProgressEvent,
    ResumeAsked,
    StopAsked,
)
from slackwater.control.jobs.events import IterationDone, JobCrashed, JobEnded, JobSubmitted
from slackwater.control.operations.restarts import RestartPolicy
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobStage

DRIVER = "driver:"  # of the names of its timers; a job follows
MOST_CRASHES = 5
BACKOFF = RestartPolicy(first_s=0.5, longest_s=60.0)


class DriverStage(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    OVER = "over"


@dataclass(slots=True)
class JobDriver:
    """One job's driver: `attempt` counts processes, `crashes` failures in a row."""

    job: JobId
    tenant: TenantId
    terms: JobTerms
    profile: JobProfile | None
    stage: DriverStage = DriverStage.WAITING
    attempt: int = 0
    crashes: int = 0
    earliest_s: float = 0.0
    due: bool = False
    over: JobStage | None = None
    reason: str = ""

    def submission(self, now_s: float) -> JobSubmitted:
        return JobSubmitted(now_s, self.job, self.tenant, self.profile, self.terms, driven=True)


class DriverRegistry:
    """See the module."""

    def __init__(self) -> None:
        self._drivers: dict[JobId, JobDriver] = {}
        self._out: list[DriverCommand] = []

    def handle(self, event: DriverEvent) -> Sequence[DriverCommand]:
        self._out = []
        if isinstance(event, DriverSubmitted):
            self._submit(event)
        elif isinstance(event, DriverAdopted):
            self._adopt(event)
        else:
            if isinstance(event, TimerFired):
                job = JobId(event.name.removeprefix(DRIVER))
            else:
                job = event.job
            if (driver := self._drivers.get(job)) is not None:
                self._continue(driver, event)
        return self._out

    # ---- queries ----
    def find(self, job: JobId) -> JobDriver | None:
        """The caller must not change it."""
        return self._drivers.get(job)

    # ---- life ----
    def _submit(self, event: DriverSubmitted) -> None:
        known = self._drivers.get(event.job)
        if known is not None and known.stage is not DriverStage.OVER:
            return
        driver = JobDriver(event.job, event.tenant, event.terms, event.profile)
        if known is not None:
            driver.attempt = known.attempt  # an attempt's number is used once
        self._drivers[event.job] = driver
        self._out.append(driver.submission(event.now_s))

    def _adopt(self, event: DriverAdopted) -> None:
        if event.job in self._drivers:
            return
        driver = JobDriver(event.job, event.tenant, event.terms, event.profile)
        driver.attempt, driver.crashes, driver.over = event.attempt, event.crashes, event.over
        self._drivers[event.job] = driver
        if event.over is not None:
            driver.stage = DriverStage.LEAVING if event.lives else DriverStage.OVER
            if event.lives:
                self._out.append(EndDriver(event.job, event.attempt))
            return
        if event.lives:
            driver.stage = DriverStage.RUNNING
        self._out.append(driver.submission(event.now_s))

    def _continue(
        self, driver: JobDriver, event: ProgressEvent | IterationDone | TimerFired
    ) -> None:
        match event:
            case DriverDue(now_s):
                driver.due = driver.stage is DriverStage.WAITING
                self._start(driver, now_s)
            case TimerFired(now_s):
                self._start(driver, now_s)
            case DriverUndue(_, _, stage, reason):
                self._end(driver, stage, reason)
            case DriverEnded():
                if event.attempt == driver.attempt:
                    self._record_end(driver, event)
            case IterationDone():
                driver.crashes = 0
            case StopAsked(now_s):
                self._stop(driver, now_s)
            case ResumeAsked(now_s):
                if driver.stage is DriverStage.OVER:
                    driver.stage, driver.over, driver.reason = DriverStage.WAITING, None, ""
                    driver.crashes, driver.earliest_s, driver.due = 0, 0.0, False
                    self._keep(driver)
                    self._out.append(driver.submission(now_s))
            case _:
                assert_never(event)

    def _start(self, driver: JobDriver, now_s: float) -> None:
        if driver.stage is not DriverStage.WAITING or not driver.due:
            return
        if now_s < driver.earliest_s:
            self._out.append(SetTimer(DRIVER + driver.job, driver.earliest_s))
            return
        driver.stage, driver.due = DriverStage.RUNNING, False
        driver.attempt += 1
        self._keep(driver)
        self._out.append(StartDriver(driver.job, driver.attempt))

    def _stop(self, driver: JobDriver, now_s: float) -> None:
        reason, waits = "its owner stopped it", driver.stage is DriverStage.WAITING
        self._end(driver, JobStage.STOPPED, reason)
        if waits:
            self._out.append(JobEnded(now_s, driver.job, "stopped", reason))

    def _end(self, driver: JobDriver, stage: JobStage, reason: str) -> None:
        """Start no process for it any more; it is over once the last one has ended."""
        if driver.stage in (DriverStage.LEAVING, DriverStage.OVER):
            return
        runs = driver.stage is DriverStage.RUNNING
        driver.stage = DriverStage.LEAVING if runs else DriverStage.OVER
        driver.over, driver.reason = stage, reason
        self._keep(driver)
        if runs:
            self._out.append(EndDriver(driver.job, driver.attempt))

    def _record_end(self, driver: JobDriver, event: DriverEnded) -> None:
        if driver.stage is DriverStage.LEAVING:
            driver.stage = DriverStage.OVER
            if driver.over is JobStage.STOPPED:
                self._out.append(JobEnded(event.now_s, driver.job, "stopped", driver.reason))
            return
        if driver.stage is not DriverStage.RUNNING:
            return
        if event.status == 0:
            self._finish(driver, event.now_s, "finished", "")
            return
        reason = _exit_reason(event)
        if event.status is not None:
            driver.crashes += 1
            driver.earliest_s = event.now_s + BACKOFF.delay_s(driver.crashes)
        if event.hopeless or driver.crashes >= MOST_CRASHES:
            often = "" if event.hopeless else f" {driver.crashes} times in a row"
            self._finish(driver, event.now_s, "failed", f"its driver ended{often}: {reason}")
            return
        driver.stage, driver.due, driver.reason = DriverStage.WAITING, False, reason
        self._keep(driver)
        self._out.append(JobCrashed(event.now_s, driver.job, f"its driver ended: {reason}"))

    def _finish(
        self,
        driver: JobDriver,
        now_s: float,
        outcome: Literal["finished", "failed"],
        reason: str,
    ) -> None:
        driver.stage, driver.over, driver.reason = DriverStage.OVER, JobStage(outcome), reason
        self._keep(driver)
        self._out.append(JobEnded(now_s, driver.job, outcome, reason))

    def _keep(self, driver: JobDriver) -> None:
        self._out.append(
            KeepDriver(driver.job, driver.attempt, driver.crashes, driver.over, driver.reason)
        )

    def check_integrity(self) -> None:
        for job, driver in self._drivers.items():
            assert driver.job == job
            ends = driver.stage in (DriverStage.LEAVING, DriverStage.OVER)
            assert ends == (driver.over is not None), f"{job} is {driver.stage}, {driver.over}"
            assert driver.over is None or driver.over.over
            assert driver.crashes <= MOST_CRASHES
            assert not (driver.due and driver.stage is DriverStage.RUNNING)


def _exit_reason(event: DriverEnded) -> str:
    if event.status is None:
        return "its exit status is unknown"
    how = f"status {event.status}" if event.status >= 0 else f"signal {-event.status}"
    return f"{how}: {event.said}" if event.said else how
