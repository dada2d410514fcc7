"""Tinker API: list, describe, change and delete training runs and checkpoints."""

import datetime
import json
import secrets
import time
from dataclasses import replace
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import APIRouter, Query
from fastapi.responses import Response
from sqlalchemy.engine import Connection

from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.model.ids import ModelId, TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.checkpoints import (
    EXTERNAL,
    SAMPLER,
    STATE,
    Checkpoint,
    checkpoint_path,
    drop_checkpoint,
    find_checkpoint,
    put_checkpoint,
    update_checkpoint,
)
from slackwater.runtime.store.schema import models, operations
from slackwater.serve.http.auth import Caller
from slackwater.serve.http.large_bodies import LargeBodyRoute
from slackwater.serve.tinker import bodies
from slackwater.serve.tinker.checkpoints import read_checkpoint, read_checkpoints

_TYPES = {STATE: "training", SAMPLER: "sampler", EXTERNAL: "external"}
Limit = Annotated[int, Query(ge=0, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Scope = Literal["owned", "accessible"]


def moment(seconds: float) -> str:
    """Seconds since the epoch as ISO 8601."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": moment(checkpoint.created_s),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires_s is None else moment(checkpoint.expires_s),
    }


async def list_runs(
    plane: ControlPlane, tenant: TenantId, model: str | None = None
) -> list[dict[str, Any]]:
    """Training runs as plain data, newest first."""
    columns = models.c

    def read(connection: Connection) -> list[Any]:
        last = (
            sa.select(operations.c.model, sa.func.max(operations.c.created_s).label("last_s"))
            .group_by(operations.c.model)
            .subquery()
        )
        query = (
            sa.select(models, last.c.last_s)
            .join(last, last.c.model == columns.model, isouter=True)
            .where(columns.tenant == tenant)
        )
        if model is not None:
            query = query.where(columns.model == model)
        return list(connection.execute(query.order_by(columns.created_s.desc(), columns.model)))

    rows = await plane.store.call(read)
    found = await read_checkpoints(plane, tenant)
    return [_run(row, [each for each in found if each.model == row.model]) for row in rows]


async def _find_run(plane: ControlPlane, tenant: TenantId, model: str) -> dict[str, Any]:
    found = await list_runs(plane, tenant, model)
    if not found:
        raise NotFoundError(f"training_run_id: {model!r} is not a training run of yours")
    return found[0]


def _run(row: Any, checkpoints: list[Checkpoint]) -> dict[str, Any]:
    newest = {kind: next((c for c in checkpoints if c.kind == kind), None) for kind in _TYPES}
    state, sampler = newest[STATE], newest[SAMPLER]
    return {
        "training_run_id": row.model,
        "base_model": row.base_model,
        "model_owner": row.tenant,
        "is_lora": row.lora_rank > 0,
        "lora_rank": row.lora_rank or None,
        "corrupted": False,
        "last_request_time": moment(row.last_s or row.created_s),
        "last_checkpoint": None if state is None else describe_checkpoint(state),
        "last_sampler_checkpoint": None if sampler is None else describe_checkpoint(sampler),
        "user_metadata": json.loads(row.user_metadata),
    }


def page_of(items: list[Any], limit: int, offset: int) -> tuple[list[Any], dict[str, int]]:
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor


def rest_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/api/v1", tags=["tinker: what there is"])

    @router.post("/weights_info")
    async def weights_info(body: bodies.TinkerPathBody, tenant: Caller) -> dict[str, Any]:
        checkpoint = await read_checkpoint(plane, tenant, body.tinker_path)
        return {
            "base_model": checkpoint.base_model,
            "is_lora": True,  # rank 0 is full fine-tuning, and the SDK recreates it from the rank
            "lora_rank": checkpoint.lora.rank,
            "train_unembed": checkpoint.lora.train_unembed,
            "train_mlp": checkpoint.lora.train_mlp,
            "train_attn": checkpoint.lora.train_attn,
            "optimizer_config": {"type": "adamw"},
        }

    @router.get("/training_runs")
    async def training_runs(
        tenant: Caller, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
    ) -> dict[str, Any]:
        page, cursor = page_of(await list_runs(plane, tenant), limit, offset)
        return {"training_runs": page, "cursor": cursor}

    @router.get("/training_runs/{run_id}")
    async def training_run(
        run_id: str, tenant: Caller, access_scope: Scope = "owned"
    ) -> dict[str, Any]:
        return await _find_run(plane, tenant, run_id)

    @router.get("/training_runs/{run_id}/checkpoints")
    async def run_checkpoints(run_id: str, tenant: Caller) -> dict[str, Any]:
        checkpoints = await read_checkpoints(plane, tenant, ModelId(run_id))
        if not checkpoints:
            await _find_run(plane, tenant, run_id)
        return {"checkpoints": [describe_checkpoint(item) for item in checkpoints]}

    @router.get("/checkpoints")
    async def all_checkpoints(
        tenant: Caller, limit: Limit = 100, offset: Offset = 0
    ) -> dict[str, Any]:
        page, cursor = page_of(await read_checkpoints(plane, tenant), limit, offset)
        return {"checkpoints": [describe_checkpoint(item) for item in page], "cursor": cursor}

    return router


def checkpoint_change_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/api/v1", tags=["tinker: what there is"])

    async def find_owned(tenant: TenantId, model: str, kind: str, name: str) -> Checkpoint:
        path = f"tinker://{model}/{kind}/{name}"
        return await read_checkpoint(plane, tenant, path, is_owner=True)

    async def update(tenant: TenantId, model: str, kind: str, name: str, **values: Any) -> None:
        path = (await find_owned(tenant, model, kind, name)).path
        await plane.store.call(lambda c: update_checkpoint(c, path, **values))

    @router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=204)
    async def delete(run_id: str, kind: str, name: str, tenant: Caller) -> Response:
        checkpoint = await find_owned(tenant, run_id, kind, name)
        await plane.store.call(lambda c: drop_checkpoint(c, checkpoint.path))
        await plane.housekeeping.remove_files(checkpoint)
        return Response(status_code=204)

    @router.post("/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", status_code=204)
    async def publish(run_id: str, kind: str, name: str, tenant: Caller) -> Response:
        """Let every tenant of this service read the checkpoint."""
        await update(tenant, run_id, kind, name, public=True)
        return Response(status_code=204)

    @router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", status_code=204)
    async def unpublish(run_id: str, kind: str, name: str, tenant: Caller) -> Response:
        await update(tenant, run_id, kind, name, public=False)
        return Response(status_code=204)

    @router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
    async def set_ttl(
        run_id: str, kind: str, name: str, body: bodies.TtlBody, tenant: Caller
    ) -> Response:
        expires_s = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
        await update(tenant, run_id, kind, name, expires_s=expires_s)
        return Response(status_code=204)

    @router.post("/copy_weights")
    async def copy_weights(body: bodies.CopyWeightsBody, tenant: Caller) -> dict[str, str]:
        """Add a name for the same files, which live as long as any name."""
        if body.session_id is not None:
            session = plane.sessions.get(tenant, body.session_id)
            if body.model_seq_id is None:
                raise ConfigError.of("model_seq_id", None, "must be given with session_id")
            owner = ModelId(f"{session.session}:train:{body.model_seq_id}")
        else:
            owner = ModelId(f"copy-{secrets.token_hex(8)}")

        def write(connection: Connection) -> str:
            now_s = time.time()
            source = find_checkpoint(connection, tenant, body.source_path, now_s)
            path = checkpoint_path(owner, source.kind, source.name)
            expires_s = None if body.ttl_seconds is None else now_s + body.ttl_seconds
            own = replace(source, path=path, tenant=tenant, model=owner, public=False)
            copy = replace(own, created_s=now_s, expires_s=expires_s)
            put_checkpoint(connection, copy)
            return path

        return {"tinker_path": await plane.store.call(write)}

    return router
