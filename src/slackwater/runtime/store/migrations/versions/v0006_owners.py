"""Actions are named `NAME@TENANT` instead of `TENANT.NAME`, which two tenants could share, and
snapshots have owners.

Environments keep their ids: their workers hold them under these.
"""

from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "snapshots",
        sa.Column("snapshot", sa.String, primary_key=True),
        sa.Column("node", sa.String, primary_key=True),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_s", sa.Float, nullable=False),
    )
    for name in ("actions", "environments"):
        _name_owners(name, name.removesuffix("s"))


def _name_owners(name: str, key: str) -> None:
    table = sa.table(name, sa.column(key), sa.column("tenant"), sa.column("payload"))
    connection = op.get_bind()
    for row in connection.execute(sa.select(table)).all():
        payload: dict[str, Any] = msgspec.msgpack.decode(row.payload)
        payload["spec"]["tenant"] = row.tenant
        if payload.get("snapshot"):
            payload["snapshot"] = payload["snapshot"].removeprefix(f"{row.tenant}.")
        renamed = _rename(row[0], row.tenant) if key == "action" else row[0]
        payload["spec"][key] = renamed
        values = {key: renamed, "payload": msgspec.msgpack.encode(payload)}
        connection.execute(table.update().where(table.c[key] == row[0]).values(values))


def _rename(action: str, tenant: str) -> str:
    prefix = f"{tenant}."
    return f"{action.removeprefix(prefix)}@{tenant}" if action.startswith(prefix) else action
