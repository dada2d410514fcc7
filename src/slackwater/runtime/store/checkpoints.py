"""Named checkpoints: rows in the store, files in the state directory or the weight store."""

import asyncio
import json
import re
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.model.ids import ModelId, TenantId
from slackwater.model.session import LoraShape
from slackwater.model.tenant_limits import TenantLimits
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.operation_log import lora_columns, lora_of
from slackwater.runtime.store.schema import checkpoints

STATE = "weights"
SAMPLER = "sampler_weights"
EXTERNAL = "external_weights"
HELD_AS_VERSIONS = (SAMPLER, EXTERNAL)
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights|external_weights)/([^/]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+=@-]{0,127}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved thing: `held_as` is a folder (state) or a weight version (sampler, external)."""

    path: str
    tenant: TenantId
    model: ModelId
    kind: str
    name: str
    base_model: str
    lora: LoraShape
    held_as: str
    lineage: str
    size_bytes: int
    created_s: float
    expires_s: float | None
    public: bool
    user_metadata: dict[str, str] | None


def checkpoint_path(model: ModelId, kind: str, name: str) -> str:
    """The path that clients use; refuses names that could not be one."""
    if not _NAME.fullmatch(name):
        raise ConfigError.of(
            "path", name, "must be a name of 1-128 letters, digits or _ . : + = @ - (no slash)"
        )
    return f"tinker://{model}/{kind}/{name}"


def parse_path(path: str) -> tuple[ModelId, str, str]:
    """Returns model, kind and name."""
    match = _PATH.fullmatch(path)
    if match is None:
        raise ConfigError.of("path", path, "must be tinker://MODEL/weights|sampler_weights/NAME")
    return ModelId(match[1]), match[2], match[3]


_PLAIN = tuple(f.name for f in fields(Checkpoint) if f.name not in ("lora", "user_metadata"))


def _checkpoint_of(row: Row[Any]) -> Checkpoint:
    metadata = json.loads(row.user_metadata) if row.user_metadata else None
    plain = {name: getattr(row, name) for name in _PLAIN}
    return Checkpoint(**plain, lora=lora_of(row), user_metadata=metadata)


def put_checkpoint(connection: Connection, new: Checkpoint) -> None:
    """Write the row, or write it over; refuses to overwrite another tenant's."""
    owner = sa.select(checkpoints.c.tenant).where(checkpoints.c.path == new.path)
    if connection.execute(owner).scalar() not in (None, new.tenant):
        raise NotFoundError(f"checkpoint {new.path}: is not one of yours")
    connection.execute(checkpoints.delete().where(checkpoints.c.path == new.path))
    row = {name: getattr(new, name) for name in _PLAIN}
    metadata = json.dumps(new.user_metadata) if new.user_metadata else None
    connection.execute(
        checkpoints.insert().values(**row, **lora_columns(new.lora), user_metadata=metadata)
    )


def find_checkpoint(
    connection: Connection, tenant: TenantId, path: str, now_s: float, *, readable: bool = True
) -> Checkpoint:
    """Find one that the tenant owns or, if `readable`, that is public."""
    parse_path(path)
    row = connection.execute(sa.select(checkpoints).where(checkpoints.c.path == path)).first()
    visible = row is not None and (row.tenant == tenant or (readable and row.public))
    if row is None or not visible or (row.expires_s is not None and row.expires_s <= now_s):
        raise NotFoundError(f"checkpoint {path}: there is none, or it has expired")
    return _checkpoint_of(row)


def list_checkpoints(
    connection: Connection, tenant: TenantId, now_s: float, model: ModelId | None = None
) -> list[Checkpoint]:
    """Those of a tenant, or of one of its models; newest first."""
    columns = checkpoints.c
    query = sa.select(checkpoints).where(
        columns.tenant == tenant, sa.or_(columns.expires_s.is_(None), columns.expires_s > now_s)
    )
    if model is not None:
        query = query.where(columns.model == model)
    return [
        _checkpoint_of(row)
        for row in connection.execute(query.order_by(columns.created_s.desc(), columns.path))
    ]


async def check_room(
    store: Store, folder: Path, limits: TenantLimits, tenant: TenantId, path: str
) -> None:
    """Refuse to save at `path` if the tenant's other checkpoints take all its share of the disk."""
    usage = await asyncio.to_thread(shutil.disk_usage, folder)
    most = limits.checkpoint_bytes(usage.total)
    if most is None:
        return
    columns = checkpoints.c
    others = (columns.tenant == tenant, columns.path != path)
    total = sa.select(sa.func.sum(columns.size_bytes)).where(*others)
    held = int(await store.call(lambda c: c.execute(total).scalar()) or 0)
    if held >= most:
        raise RefusedError(
            f"path: tenant {tenant} keeps {held} bytes of checkpoints and may keep {most} "
            "([limits] checkpoint_share); delete some"
        )


def drop_checkpoint(connection: Connection, path: str) -> None:
    connection.execute(checkpoints.delete().where(checkpoints.c.path == path))


def find_expired(connection: Connection, now_s: float) -> list[Checkpoint]:
    columns = checkpoints.c
    rows = connection.execute(
        sa.select(checkpoints).where(columns.expires_s.is_not(None), columns.expires_s <= now_s)
    )
    return [_checkpoint_of(row) for row in rows]


def update_checkpoint(connection: Connection, path: str, **values: Any) -> None:
    connection.execute(checkpoints.update().where(checkpoints.c.path == path).values(**values))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
