"""Actions and their environments."""

from alembic import op
from sqlalchemy import Column, Float, Index, LargeBinary, MetaData, String, Table, Text

metadata = MetaData()

actions = Table(
    "actions",
    metadata,
    Column("action", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("status", String, nullable=False, index=True),  # waiting, started, ended
    Column("result", LargeBinary),
    Column("created_s", Float, nullable=False),
    Column("finished_s", Float),
    Index("actions_finished", "finished_s"),
)

environments = Table(
    "environments",
    metadata,
    Column("environment", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("ended", Text),  # why, once it has
    Column("created_s", Float, nullable=False),
    Column("finished_s", Float),
    Index("environments_finished", "finished_s"),
)


revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    metadata.create_all(op.get_bind())
