"""Jobs, live: sessions and requests make them, the job book keeps their life and accounts, the store what they used."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

from slackwater.control.brain import BrainEvent
from slackwater.control.jobs.book import JobBook
from slackwater.control.jobs.events import JobEnded, JobSubmitted
from slackwater.model.ids import JobId, SessionId, TenantId
from slackwater.runtime.services.sessions import Sessions
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.job_accounts import save_accounts, saved_accounts, shown


class Jobs:
    """`feed` tells the brain; `book` is its job book, to look at. The `operator` sees everybody's."""

    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        book: JobBook,
        feed: Callable[[BrainEvent], None],
        operator: str,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._book = book
        self._feed = feed
        self._operator = operator

    async def adopt(self, now_s: float) -> None:
        """Take over sessions, the accounts so far, and the jobs of sessions that live."""
        await self._sessions.adopt(now_s)
        for adopted in await self._store.call(lambda c: saved_accounts(c, now_s)):
            self._feed(adopted)
        for job, tenant in self._sessions.jobs().items():
            self.seen(job, tenant)

    async def save(self) -> None:
        """What every job has used so far, durably."""
        entries = self._book.entries()
        if entries:
            await self._store.call(lambda c: save_accounts(c, entries))

    def seen(self, job: JobId, tenant: TenantId) -> None:
        """Something of a job came: it is submitted, if it is not known or was over."""
        entry = self._book.find(job)
        if entry is None or entry.stage.over:
            self._feed(JobSubmitted(_now_s(), job, tenant))

    def session_ended(self, session: SessionId, status: dict[str, Any], reason: str) -> None:
        """The job ends with the last of its sessions."""
        job = self._sessions.job_of(session)
        if job not in self._sessions.jobs():
            self._feed(JobEnded(_now_s(), job, _outcome(status), reason))

    def listed(self, tenant: TenantId) -> list[dict[str, Any]]:
        """The tenant's jobs, oldest first."""
        now_s, entries = _now_s(), self._book.entries()
        everybody = tenant == self._operator
        return [shown(entry, now_s) for entry in entries if everybody or entry.tenant == tenant]


def _outcome(status: dict[str, Any]) -> Literal["finished", "failed", "stopped"]:
    """How a job ended, by what its last session's client said."""
    said = status.get("reason", {}).get("type")
    if said == "success":
        return "finished"
    return "failed" if said == "errored" else "stopped"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
