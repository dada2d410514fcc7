"""The durable log of sampling sessions and sample requests: functions of a connection.

Clients poll a session's finished requests by a cursor, a unique time in microseconds, which stays
valid across a restart of the service.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.engine import Row as DatabaseRow

from slackwater.model.errors import RefusedError
from slackwater.model.ids import RequestId, SamplingSessionId, SessionId
from slackwater.model.operation import OpStatus
from slackwater.model.session import SamplingSession
from slackwater.runtime.store.database import Row
from slackwater.runtime.store.op_payloads import FORMAT
from slackwater.runtime.store.operation_log import digest_of
from slackwater.runtime.store.outcomes import RequestOutcome
from slackwater.runtime.store.schema import samples, sampling_sessions

_AT_ONCE = 1000  # values in one statement; databases have limits
# Made once: making a statement takes longer than executing it.
_NUMBERED = sa.select(samples.c.request, samples.c.digest).where(
    samples.c.sampling_session == sa.bindparam("in_session"),
    samples.c.seq == sa.bindparam("number"),
)
_NEW = ("request", "sampling_session", "tenant", "seq", "digest", "payload", "status")
_ADD = str(samples.insert().compile(column_keys=(*_NEW, "created_s", "format")))
_ENDED = ("payload", "status", "finished_s", "result", "error", "owner")
_FINISH = str(
    samples.update()
    .where(samples.c.request == sa.bindparam("finished"))
    .compile(column_keys=_ENDED)
)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """`size_bytes` is None where there is no result: the request failed, or it was acknowledged."""

    request: RequestId
    finished_s: float
    size_bytes: int | None


class FinishedRequestFeed:
    """Finished requests by session, in memory; rebuilt from the store at start."""

    def __init__(self) -> None:
        self._finished: dict[SamplingSessionId, dict[int, FinishedRequest]] = {}
        self._news: dict[SamplingSessionId, asyncio.Event] = {}
        self._cursor = 0
        self._closed = False

    def add(self, session: SamplingSessionId, finished: FinishedRequest) -> None:
        self._cursor = max(self._cursor + 1, int(finished.finished_s * 1e6))
        self._finished.setdefault(session, {})[self._cursor] = finished
        if session in self._news:
            self._news[session].set()

    def acknowledge(self, session: SamplingSessionId, requests: Collection[RequestId]) -> None:
        """Drop requests that the client has read."""
        by_cursor = self._finished.get(session, {})
        for cursor in [c for c, finished in by_cursor.items() if finished.request in requests]:
            del by_cursor[cursor]

    def drop(self, session: SamplingSessionId) -> None:
        self._finished.pop(session, None)
        self._news.pop(session, None)

    async def after(
        self, session: SamplingSessionId, cursor: int, hold_s: float
    ) -> tuple[list[FinishedRequest], int]:
        """What finished after `cursor`, and the cursor after it; waits for something to finish."""
        found = self._after(session, cursor)
        if not found and not self._closed:
            news = self._news[session] = asyncio.Event()
            try:
                async with asyncio.timeout(hold_s):
                    await news.wait()
            except TimeoutError:
                return [], cursor
            found = self._after(session, cursor)
        return list(found.values()), max(found, default=cursor)

    def close(self) -> None:
        """Wake every waiter."""
        self._closed = True
        for news in self._news.values():
            news.set()

    def _after(self, session: SamplingSessionId, cursor: int) -> dict[int, FinishedRequest]:
        by_cursor = self._finished.get(session, {})
        return {place: finished for place, finished in by_cursor.items() if place > cursor}


def add_sampling_session(
    connection: Connection, new: SamplingSession, seq: int | None, now_s: float
) -> None:
    """Nothing if it is there."""
    known = connection.execute(
        sa.select(sampling_sessions.c.session).where(
            sampling_sessions.c.sampling_session == new.sampling_session
        )
    ).first()
    if known is not None:
        return
    connection.execute(
        sampling_sessions.insert().values(**asdict(new), seq=seq, clones=0, created_s=now_s)
    )


def sampling_session_of(row: DatabaseRow[Any]) -> SamplingSession:
    return msgspec.convert(row, SamplingSession, from_attributes=True)


def find_by_seq(connection: Connection, session: SessionId, seq: int) -> SamplingSession | None:
    """The one that a client numbered `seq` with create_sampling_session."""
    columns = sampling_sessions.c
    row = connection.execute(
        sa.select(sampling_sessions).where(
            columns.session == session, columns.seq == seq, columns.model.is_(None)
        )
    ).first()
    return None if row is None else sampling_session_of(row)


def count_of_lineage(connection: Connection, session: SessionId, lineage: str) -> int:
    """How many sampling sessions of a session have this origin."""
    columns = sampling_sessions.c
    found = connection.execute(
        sa.select(sa.func.count()).where(
            columns.session == session, columns.lineage.startswith(lineage, autoescape=True)
        )
    ).scalar_one()
    return int(found)


def join_session(connection: Connection, sampling_session: SamplingSessionId) -> int:
    """The number of one more clone: 1, 2, ..."""
    columns = sampling_sessions.c
    connection.execute(
        sampling_sessions.update()
        .where(columns.sampling_session == sampling_session)
        .values(clones=columns.clones + 1)
    )
    clones = connection.execute(
        sa.select(columns.clones).where(columns.sampling_session == sampling_session)
    ).scalar_one()
    return int(clones)


def find_numbered(
    connection: Connection, session: SamplingSession, seq: int, payload: bytes
) -> RequestId | RefusedError | None:
    """The request that has this number already, if any; another one's is refused."""
    numbered = {"in_session": session.sampling_session, "number": seq}
    found = connection.execute(_NUMBERED, numbered).first()
    if found is None:
        return None
    if found.digest != digest_of(payload):
        return RefusedError(f"seq_id: {seq} was sent before with another request")
    return RequestId(found.request)


def new_row(
    request: RequestId, session: SamplingSession, seq: int, payload: bytes, now_s: float
) -> Row:
    """The row of a new request."""
    row = {
        "request": request,
        "sampling_session": session.sampling_session,
        "tenant": session.tenant,
        "seq": seq,
        "digest": digest_of(payload),
        "payload": payload,
        "status": OpStatus.WAITING.value,
        "created_s": now_s,
        "format": FORMAT,
    }
    return Row(_ADD, row, len(payload))


def finish_row(request: RequestId, outcome: RequestOutcome, now_s: float) -> Row:
    """The changes of the row of a request that ended."""
    changed = {"finished": request, "payload": None, **outcome.columns(now_s)}
    return Row(_FINISH, changed, len(outcome.result or b""))


def drop_results(
    connection: Connection, session: SamplingSessionId, requests: Sequence[RequestId]
) -> None:
    """Results that were acknowledged; the rows stay, so that their numbers stay used."""
    for start in range(0, len(requests), _AT_ONCE):
        some = requests[start : start + _AT_ONCE]
        connection.execute(
            samples.update()
            .where(samples.c.sampling_session == session, samples.c.request.in_(some))
            .values(result=None)
        )


def drop_sampling_sessions(connection: Connection, names: Sequence[SamplingSessionId]) -> None:
    columns = sampling_sessions.c
    for start in range(0, len(names), _AT_ONCE):
        some = names[start : start + _AT_ONCE]
        connection.execute(sampling_sessions.delete().where(columns.sampling_session.in_(some)))


def drop_orphans(connection: Connection, oldest_s: float) -> None:
    """Requests of sampling sessions that are gone, once their results would have expired."""
    held = sa.select(sampling_sessions.c.sampling_session)
    connection.execute(
        samples.delete().where(
            samples.c.created_s < oldest_s, samples.c.sampling_session.not_in(held)
        )
    )


def read_waiting(connection: Connection) -> list[tuple[str, str, bytes]]:
    """Request, sampling session and payload of what is unanswered, oldest first."""
    columns = samples.c
    rows = connection.execute(
        sa.select(columns.request, columns.sampling_session, columns.payload)
        .where(columns.status == OpStatus.WAITING.value)
        .order_by(columns.created_s, columns.request)
    )
    return [(row.request, row.sampling_session, row.payload) for row in rows]


def read_finished(connection: Connection) -> list[tuple[str, FinishedRequest]]:
    """Sampling session and request of what is answered and not yet acknowledged, oldest first."""
    columns = samples.c
    rows = connection.execute(
        sa.select(
            columns.request,
            columns.sampling_session,
            columns.finished_s,
            sa.func.length(columns.result).label("size_bytes"),
        )
        .where(
            columns.finished_s.is_not(None),
            sa.or_(columns.result.is_not(None), columns.error.is_not(None)),
        )
        .order_by(columns.finished_s)
    )
    finished = partial(msgspec.convert, type=FinishedRequest, from_attributes=True)
    return [(row.sampling_session, finished(row)) for row in rows]
