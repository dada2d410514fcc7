"""Weight versions: those that the store names, and the shelf that holds their files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from slackwater.runtime.store.checkpoints import HELD_AS_VERSIONS
from slackwater.runtime.store.schema import checkpoints, models, sampling_sessions


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """A version, the session whose model made it, and whether it is an adapter over its base."""

    version: str
    base_model: str
    session: str
    line: str
    adapter: bool


def read_known_versions(connection: Connection) -> list[KnownVersion]:
    """Each once, oldest first."""
    saved = sa.select(
        checkpoints.c.held_as.label("version"), checkpoints.c.model, checkpoints.c.created_s
    ).where(checkpoints.c.kind.in_(HELD_AS_VERSIONS))
    sampled = sa.select(
        sampling_sessions.c.version, sampling_sessions.c.model, sampling_sessions.c.created_s
    ).where(sampling_sessions.c.model.is_not(None))
    named = sa.union_all(saved, sampled).subquery()
    rows = connection.execute(
        sa.select(named.c.version, models.c.model, models.c.session, models.c.base_model)
        .add_columns(models.c.lora_rank)
        .join(models, models.c.model == named.c.model)
        .order_by(named.c.created_s, named.c.version)
    )
    found = {
        row.version: KnownVersion(
            row.version, row.base_model, row.session, row.model, row.lora_rank > 0
        )
        for row in rows
    }
    return list(found.values())


class VersionShelf(Protocol):
    """The weight versions on disk (see `weights/`)."""

    def paths(self, version: str) -> tuple[Path, ...]:
        """The files of a version, one per rank that wrote it, or the one that is missing."""

    def join(self, version: str, target: Path) -> None:
        """Write what several ranks wrote of a version as one file."""

    def meta(self, version: str) -> Mapping[str, Any]:
        """What its publisher wrote with a version."""

    def versions(self) -> tuple[str, ...]: ...

    def drop(self, version: str) -> None: ...
