"""What operations brought with them lies in a table of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    payloads = op.create_table(
        "operation_payloads",
        sa.Column("request", sa.String, primary_key=True),
        sa.Column("payload", sa.LargeBinary, nullable=False),
    )
    operations = sa.table("operations", sa.column("request"), sa.column("payload"))
    brought = sa.select(operations).where(operations.c.payload.is_not(None))
    op.get_bind().execute(payloads.insert().from_select(["request", "payload"], brought))
    op.drop_column("operations", "payload")
