"""Submitted jobs."""

from alembic import op
from sqlalchemy import Column, Float, Integer, MetaData, String, Table, Text

metadata = MetaData()

jobs = Table(
    "jobs",
    metadata,
    Column("job", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("submission", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("crashes", Integer, nullable=False),
    Column("over", String),
    Column("reason", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("ended_s", Float),
)

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    metadata.create_all(op.get_bind())
