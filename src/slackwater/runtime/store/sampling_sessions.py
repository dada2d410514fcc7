"""The durable sampling sessions: functions of a connection."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from slackwater.model.ids import SamplingSessionId, SessionId
from slackwater.model.session import SamplingSession
from slackwater.runtime.store.schema import samples, sampling_sessions

IN_ONE_STATEMENT = 1000  # values; databases have limits


def add_sampling_session(
    connection: Connection, new: SamplingSession, seq: int | None, now_s: float
) -> None:
    """Nothing changes if it is there."""
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


def _sampling_session_of(row: Row[Any]) -> SamplingSession:
    return msgspec.convert(row, SamplingSession, from_attributes=True)


def read_sampling_sessions(connection: Connection) -> list[SamplingSession]:
    """Oldest first."""
    query = sa.select(sampling_sessions).order_by(sampling_sessions.c.created_s)
    return [_sampling_session_of(row) for row in connection.execute(query)]


def find_by_seq(connection: Connection, session: SessionId, seq: int) -> SamplingSession | None:
    """The one that a client numbered `seq` with create_sampling_session."""
    columns = sampling_sessions.c
    row = connection.execute(
        sa.select(sampling_sessions).where(
            columns.session == session, columns.seq == seq, columns.model.is_(None)
        )
    ).first()
    return None if row is None else _sampling_session_of(row)


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
    """Returns the number of the new clone: 1, 2, ..."""
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


def drop_sampling_sessions(connection: Connection, names: Sequence[SamplingSessionId]) -> None:
    columns = sampling_sessions.c
    for start in range(0, len(names), IN_ONE_STATEMENT):
        some = names[start : start + IN_ONE_STATEMENT]
        connection.execute(sampling_sessions.delete().where(columns.sampling_session.in_(some)))


def drop_orphans(connection: Connection, oldest_s: float) -> None:
    """Requests of sampling sessions that are gone, once their results would have expired."""
    held = sa.select(sampling_sessions.c.sampling_session)
    connection.execute(
        samples.delete().where(
            samples.c.created_s < oldest_s, samples.c.sampling_session.not_in(held)
        )
    )
