"""Snapshots of environments, durable: who owns each, on which node it lies, how large it is."""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from slackwater.control.actions.snapshots import Snapshot
from slackwater.model.ids import NodeId, TenantId
from slackwater.runtime.store.schema import snapshots


def put_snapshot(connection: Connection, snapshot: Snapshot, now_s: float) -> None:
    """Write down that there is one, or how large it is."""
    drop_snapshot(connection, snapshot)
    connection.execute(
        snapshots.insert().values(
            snapshot=snapshot.kept_as,
            node=snapshot.node,
            tenant=snapshot.tenant,
            name=snapshot.name,
            size_bytes=snapshot.size_bytes,
            created_s=now_s,
        )
    )


def drop_snapshot(connection: Connection, snapshot: Snapshot) -> None:
    columns = snapshots.c
    same = (columns.snapshot == snapshot.kept_as, columns.node == snapshot.node)
    connection.execute(snapshots.delete().where(*same, columns.tenant == snapshot.tenant))


def all_snapshots(connection: Connection) -> list[Snapshot]:
    """Oldest first."""
    rows = connection.execute(sa.select(snapshots).order_by(snapshots.c.created_s))
    return [
        Snapshot(TenantId(row.tenant), row.name, NodeId(row.node), row.size_bytes) for row in rows
    ]
