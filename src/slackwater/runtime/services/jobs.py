"""Live jobs: created by sessions and requests, tracked by the registry, saved in the store."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.structs import replace

from slackwater.control.fleet.messages import FleetEvent
from slackwater.control.jobs.events import IdleJobsSought, JobAdopted, JobEnded, JobSubmitted
from slackwater.control.jobs.registry import JobRegistry
from slackwater.model.ids import JobId, SessionId, TenantId
from slackwater.model.job_life import JobAccount, JobStage
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.services.sessions import Sessions
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.job_accounts import (
    SubmittedJob,
    job_row,
    read_accounts,
    save_accounts,
)


@dataclass(eq=False)
class Jobs:
    """`feed` feeds the controller, whose `registry` is only read; the `operator` sees all jobs."""

    store: Store
    sessions: Sessions
    registry: JobRegistry
    feed: Callable[[FleetEvent], None]
    operator: str

    async def adopt(self, now_s: float, submitted: Mapping[JobId, SubmittedJob]) -> None:
        """Adopt sessions, accounts, submitted jobs, and the jobs of live sessions."""
        await self.sessions.adopt(now_s)
        saved = await self.store.call(lambda c: read_accounts(c, now_s))
        adopted = {event.job: event for event in saved}
        for job, row in submitted.items():
            event = adopted.get(job) or JobAdopted(now_s, job, row.tenant, JobAccount())
            stage = row.over or JobStage.STOPPED
            reason = row.reason or "the service was gone"
            terms = row.file.terms
            adopted[job] = replace(event, stage=stage, reason=reason, terms=terms, driven=True)
        for event in adopted.values():
            self.feed(event)
        for job, tenant in self.sessions.jobs().items():
            self.record_activity(job, tenant)

    async def save(self) -> None:
        entries = self.registry.entries()
        if entries:
            await self.store.call(lambda c: save_accounts(c, entries))

    def record_activity(self, job: JobId, tenant: TenantId) -> None:
        """A request of a job arrived: submit the job if it is unknown or over."""
        entry = self.registry.find(job)
        if entry is None or entry.stage.over:
            self.feed(JobSubmitted(loop_time(), job, tenant))

    def record_session_end(self, session: SessionId, status: dict[str, Any], reason: str) -> None:
        """End a job with its last session; a job with a driver ends with the driver."""
        job = self.sessions.job_of(session)
        entry = self.registry.find(job)
        if entry is not None and entry.driven:
            return
        if job not in self.sessions.jobs():
            self.feed(JobEnded(loop_time(), job, _outcome(status), reason))

    def end_idle(self) -> None:
        """End jobs of job keys that have sent nothing for long."""
        self.feed(IdleJobsSought(loop_time(), frozenset(self.sessions.jobs())))

    def rows(self, tenant: TenantId) -> list[dict[str, Any]]:
        """The tenant's jobs, oldest first."""
        now_s, entries = loop_time(), self.registry.entries()
        everybody = tenant == self.operator
        return [job_row(entry, now_s) for entry in entries if everybody or entry.tenant == tenant]


def _outcome(status: dict[str, Any]) -> Literal["finished", "failed", "stopped"]:
    """How a job ended, by the status that its last session's client gave."""
    kind = status.get("reason", {}).get("type")
    if kind == "success":
        return "finished"
    return "failed" if kind == "errored" else "stopped"
