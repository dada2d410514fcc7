"""Sessions of clients: kept alive by heartbeats, ended by the client or by silence."""

import json
import secrets
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from slackwater.control.operations.sessions import SessionTracker
from slackwater.model.errors import NotFoundError
from slackwater.model.ids import JobId, SessionId, TenantId
from slackwater.model.job_life import job_of_session
from slackwater.model.session import Session
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.schema import sessions

ACTIVE = {"type": "active"}
JOB = "job"  # what a session may name in its description


class Sessions:
    """All sessions, including ended ones that clients may still ask about."""

    def __init__(self, store: Store, silent_after_s: float) -> None:
        self._store = store
        self._tracker = SessionTracker(silent_after_s)
        self._sessions: dict[SessionId, Session] = {}

    async def adopt(self, now_s: float) -> None:
        """Adopt sessions; the service was away, so active ones get a fresh heartbeat."""

        def read(connection: Connection) -> list[tuple[Session, bool]]:
            rows = connection.execute(sa.select(sessions))
            return [(_session_of(row), json.loads(row.status) == ACTIVE) for row in rows]

        for session, active in await self._store.call(read):
            self._sessions[session.session] = session
            if active:
                self._tracker.touch(session.session, now_s)

    async def open(self, tenant: TenantId, description: dict[str, Any], now_s: float) -> SessionId:
        """Open a session; its description may name the job that it belongs to."""
        name = SessionId(secrets.token_hex(12))
        job = job_of_session(tenant, name, description.get(JOB))
        session = Session(name, tenant, time.time(), job)
        row = {
            "session": session.session,
            "tenant": tenant,
            "created_s": session.created_s,
            "status": json.dumps(ACTIVE),
            "described": json.dumps(description),
        }
        await self._store.call(lambda c: c.execute(sessions.insert().values(**row)) and None)
        self._sessions[session.session] = session
        self._tracker.touch(session.session, now_s)
        return session.session

    def get(self, tenant: TenantId, name: str) -> Session:
        """One of the tenant's sessions, ended or not."""
        found = self._sessions.get(SessionId(name))
        if found is None or found.tenant != tenant:
            raise NotFoundError(f"session_id: {name!r} is not a session of yours")
        return found

    def job_of(self, session: SessionId) -> JobId:
        """The job of a session; an unknown session is a job by itself."""
        found = self._sessions.get(session)
        return JobId(session) if found is None else found.job

    def jobs(self) -> dict[JobId, TenantId]:
        """The jobs of live sessions, and their tenants."""
        living = [s for s in self._sessions.values() if self._tracker.is_alive(s.session)]
        return {session.job: session.tenant for session in living}

    def live_sessions(self, job: JobId) -> list[SessionId]:
        own = [s.session for s in self._sessions.values() if s.job == job]
        return [session for session in own if self._tracker.is_alive(session)]

    def is_live(self, session: SessionId) -> bool:
        return self._tracker.is_alive(session)

    def record_heartbeat(self, session: SessionId, now_s: float) -> None:
        """Keep a session alive; one that has ended stays ended."""
        if self._tracker.is_alive(session):
            self._tracker.touch(session, now_s)

    def reap_silent(self, now_s: float) -> list[SessionId]:
        """End the sessions that have been silent too long; returns them."""
        return self._tracker.reap(now_s)

    def count_active(self) -> int:
        return sum(self._tracker.is_alive(session) for session in self._sessions)

    async def end(self, session: SessionId, status: dict[str, Any]) -> None:
        self._tracker.end(session)
        ending = sessions.update().where(sessions.c.session == session)
        await self._store.call(
            lambda c: c.execute(ending.values(status=json.dumps(status))) and None
        )

    async def describe(self, tenant: TenantId) -> list[dict[str, Any]]:
        """Every session of a tenant as plain data, newest first."""

        def read(connection: Connection) -> list[dict[str, Any]]:
            rows = connection.execute(
                sa.select(sessions)
                .where(sessions.c.tenant == tenant)
                .order_by(sessions.c.created_s.desc(), sessions.c.session)
            )
            return [
                {
                    "session_id": row.session,
                    "created_s": row.created_s,
                    "status": json.loads(row.status),
                    **json.loads(row.described),
                }
                for row in rows
            ]

        return await self._store.call(read)

    async def update_description(self, session: SessionId, **changed: Any) -> None:

        def write(connection: Connection) -> None:
            stored = connection.execute(
                sa.select(sessions.c.described).where(sessions.c.session == session)
            ).scalar_one()
            described = json.dumps(json.loads(stored) | changed)
            update = sessions.update().where(sessions.c.session == session)
            connection.execute(update.values(described=described))

        await self._store.call(write)


def _session_of(row: Row[Any]) -> Session:
    session, tenant = SessionId(row.session), TenantId(row.tenant)
    job = job_of_session(tenant, session, json.loads(row.described).get(JOB))
    return Session(session, tenant, row.created_s, job)
