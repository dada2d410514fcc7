"""The durable log of actions and environments: requests, starts and results."""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from slackwater.control.actions.snapshots import Snapshot
from slackwater.model.action import ActionSpec, EnvironmentSpec
from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.model.ids import ActionId, EnvironmentId, TenantId
from slackwater.model.tenant_limits import TenantLimits
from slackwater.runtime.store.op_payloads import FORMAT
from slackwater.runtime.store.schema import actions, environments, snapshots
from slackwater.wire.sandbox import ActionLimits

WAITING, STARTED, ENDED = "waiting", "started", "ended"

# Written out once: these run for every action, and building a statement takes longer than running
# it.
_ADD = sa.text(
    "INSERT INTO actions (action, tenant, payload, status, created_s, format) "
    f"VALUES (:action, :tenant, :payload, :status, :created_s, {FORMAT}) "
    "ON CONFLICT (action) DO NOTHING"
)
_START = sa.text(f"UPDATE actions SET status = '{STARTED}' WHERE action = :name")
_WAIT = sa.text(
    f"UPDATE actions SET status = '{WAITING}' WHERE action = :name AND status = '{STARTED}'"
)
_END = sa.text(
    f"UPDATE actions SET status = '{ENDED}', result = :said, finished_s = :now_s "
    "WHERE action = :name"
)
_ADD_ENVIRONMENT = sa.text(
    "INSERT INTO environments (environment, tenant, payload, created_s, format) "
    f"VALUES (:environment, :tenant, :payload, :created_s, {FORMAT}) "
    "ON CONFLICT (environment) DO NOTHING"
)
_END_ENVIRONMENT = sa.text(
    "UPDATE environments SET ended = :why, finished_s = :now_s "
    "WHERE environment = :name AND ended IS NULL"
)


def put_snapshot(connection: Connection, snapshot: Snapshot, now_s: float) -> None:
    """Save a snapshot, or its size."""
    drop_snapshot(connection, snapshot)
    connection.execute(
        snapshots.insert().values(
            **asdict(snapshot), snapshot=snapshot.stored_name, created_s=now_s
        )
    )


def drop_snapshot(connection: Connection, snapshot: Snapshot) -> None:
    columns = snapshots.c
    same = (columns.snapshot == snapshot.stored_name, columns.node == snapshot.node)
    connection.execute(snapshots.delete().where(*same, columns.tenant == snapshot.tenant))


def all_snapshots(connection: Connection) -> list[Snapshot]:
    """Oldest first."""
    rows = connection.execute(sa.select(snapshots).order_by(snapshots.c.created_s))
    return [msgspec.convert(row, Snapshot, from_attributes=True) for row in rows]


class ActionRequest(msgspec.Struct, frozen=True):
    """An action as requested: its cost and what is run. Without a command it is a permit."""

    spec: ActionSpec
    limits: ActionLimits
    command: list[str] = []
    variables: dict[str, str] = {}
    stdin: bytes = b""
    stream: bool = False

    @property
    def is_permit(self) -> bool:
        """Nothing is run for it; a score by a service has its tokens as `stdin`."""
        return not self.command and self.spec.service is None


def clamp_limits(request: ActionRequest, limits: TenantLimits) -> ActionRequest:
    """A stored request within the limits that its tenant has now."""
    wanted = request.limits
    allowed = ActionLimits(
        wall_s=min(wanted.wall_s, limits.limit_s),
        output_bytes=min(wanted.output_bytes, limits.output_bytes),
        memory_bytes=min(wanted.memory_bytes, limits.memory_mib << 20),
        processes=min(wanted.processes, limits.processes),
        disk_bytes=min(wanted.disk_bytes, limits.disk_mib << 20),
        network=wanted.network and bool(limits.network),
    )
    return msgspec.structs.replace(request, limits=allowed)


class ActionResult(msgspec.Struct, frozen=True):
    """How an action ended: `kind` is an `OutcomeKind`, `end` a `sandbox.reports.End` if it ran."""

    kind: str
    reason: str = ""
    end: str | None = None
    status: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    queued_s: float = 0.0
    launch_s: float = 0.0
    ran_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    cores: list[int] = []
    node: str | None = None


class EnvironmentRequest(msgspec.Struct, frozen=True):
    """An environment as it was asked for."""

    spec: EnvironmentSpec
    snapshot: str | None = None
    files: dict[str, bytes] = {}


encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(ActionRequest)
decode_result = msgspec.msgpack.Decoder(ActionResult).decode
_places = msgspec.msgpack.Decoder(EnvironmentRequest)


def add_action(
    connection: Connection,
    tenant: TenantId,
    request: ActionRequest,
    now_s: float,
    started: bool = False,
) -> bool:
    """Whether it is new; another request or another tenant under its name is refused."""
    name, payload = request.spec.action, encode(request)
    row = {
        "action": name,
        "tenant": tenant,
        "payload": payload,
        "status": STARTED if started else WAITING,
        "created_s": now_s,
    }
    if _execute(connection, _ADD, [row]):
        return True
    known = connection.execute(sa.select(actions).where(actions.c.action == name)).one()
    if known.tenant != tenant:
        raise NotFoundError(f"action: {name!r} is not one of yours")
    if known.payload != payload:
        raise RefusedError(f"action: {name!r} was another one; give each action a name of its own")
    return False


def mark_started(connection: Connection, names: Sequence[ActionId]) -> None:
    """Mark actions as started, before their workers get them."""
    _execute(connection, _START, [{"name": name} for name in names])


def mark_waiting(connection: Connection, name: ActionId) -> None:
    """Undo `mark_started` for an action that did not start at once."""
    _execute(connection, _WAIT, [{"name": name}])


def end_actions(
    connection: Connection, results: Sequence[tuple[ActionId, ActionResult]], now_s: float
) -> None:
    rows = [{"name": name, "said": encode(result), "now_s": now_s} for name, result in results]
    _execute(connection, _END, rows)


def _execute(
    connection: Connection, statement: sa.TextClause, rows: Sequence[Mapping[str, Any]]
) -> int:
    """Execute for every row; returns the changed rows. SQLite directly: SQLAlchemy takes longer."""
    if connection.dialect.name != "sqlite":
        return connection.execute(statement, rows).rowcount
    driver: Any = connection.connection.driver_connection
    try:
        changed: int = driver.executemany(statement.text, rows).rowcount
    except sqlite3.OperationalError as error:
        raise sa.exc.OperationalError(statement.text, None, error) from None
    return changed


def find_action(connection: Connection, name: ActionId) -> Row[Any] | None:
    return connection.execute(sa.select(actions).where(actions.c.action == name)).first()


def open_actions(connection: Connection) -> list[tuple[TenantId, ActionRequest, float, bool]]:
    """Actions without an outcome in order: tenant, request, since when, whether started."""
    rows = connection.execute(
        sa.select(actions).where(actions.c.status != ENDED).order_by(actions.c.created_s)
    )
    return [
        (TenantId(row.tenant), _requests.decode(row.payload), row.created_s, row.status == STARTED)
        for row in rows
    ]


def add_environment(
    connection: Connection, tenant: TenantId, request: EnvironmentRequest, now_s: float
) -> bool:
    """Whether it is new; another request or another tenant under its name is refused."""
    name, payload = request.spec.environment, encode(request)
    row = {"environment": name, "tenant": tenant, "payload": payload, "created_s": now_s}
    if _execute(connection, _ADD_ENVIRONMENT, [row]):
        return True
    known = connection.execute(
        sa.select(environments).where(environments.c.environment == name)
    ).one()
    if known.tenant != tenant:
        raise NotFoundError(f"environment: {name!r} is not one of yours")
    if known.payload != payload or known.ended is not None:
        why = "has ended" if known.ended is not None else "was another one"
        raise RefusedError(f"environment: {name!r} {why}; give each environment a name of its own")
    return False


def end_environment(connection: Connection, name: EnvironmentId, why: str, now_s: float) -> None:
    _execute(connection, _END_ENVIRONMENT, [{"name": name, "why": why, "now_s": now_s}])


def open_environments(connection: Connection) -> list[tuple[TenantId, EnvironmentRequest]]:
    rows = connection.execute(
        sa.select(environments)
        .where(environments.c.ended.is_(None))
        .order_by(environments.c.created_s)
    )
    return [(TenantId(row.tenant), _places.decode(row.payload)) for row in rows]


def drop_ended(connection: Connection, before_s: float) -> None:
    """Delete actions and environments that ended long ago."""
    for table in (actions, environments):
        connection.execute(table.delete().where(table.c.finished_s < before_s))
