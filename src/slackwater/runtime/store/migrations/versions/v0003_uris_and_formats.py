"""Saved states are named by URI, not path; stored messages carry their format's version."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_FORMATTED = ("operations", "samples", "actions", "environments")


def upgrade() -> None:
    for table in _FORMATTED:
        op.add_column(table, sa.Column("format", sa.Integer, nullable=False, server_default="1"))
    checkpoints = sa.table(
        "checkpoints", sa.column("path"), sa.column("kind"), sa.column("held_as")
    )
    connection = op.get_bind()
    states = sa.select(checkpoints).where(checkpoints.c.kind == "weights")
    for row in connection.execute(states).all():
        # .../STATE/checkpoints/MODEL/NAME@SEQ, wherever the folder was then
        held_as = "slackwater:" + "/".join(row.held_as.split("/")[-3:])
        renamed = checkpoints.update().where(checkpoints.c.path == row.path)
        connection.execute(renamed.values(held_as=held_as))
