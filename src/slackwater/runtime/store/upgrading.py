"""Opening a database: create or upgrade its tables, and refuse those of a newer version."""

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection

from slackwater.model.errors import RefusedError

_STEPS = Path(__file__).parent / "migrations"
_FIRST = "0001"  # databases of version 0.1.0 carry no number; they have its tables


def bring_up_to_date(connection: Connection) -> None:
    """Take every step that the database lacks, in the caller's transaction."""
    config = Config()
    config.set_main_option("script_location", str(_STEPS))
    config.attributes["connection"] = connection
    known = {step.revision for step in ScriptDirectory.from_config(config).walk_revisions()}
    found = MigrationContext.configure(connection).get_current_revision()
    if found is not None and found not in known:
        raise RefusedError(
            f"database: its tables are of step {found}, and this version knows steps up to "
            f"{max(known)}; it was used by a newer Slackwater: start that one, or give another "
            "--state"
        )
    if found is None and sa.inspect(connection).has_table("operations"):
        command.stamp(config, _FIRST)
    command.upgrade(config, "head")
