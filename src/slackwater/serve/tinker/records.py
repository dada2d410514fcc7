"""Tinker API: audit log, storage, timelines and exports.

All of it comes from the durable store, so it covers writes, not reads.
"""

import asyncio
import datetime
import json
import time
from email.utils import formatdate
from pathlib import Path
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from sqlalchemy.engine import Connection, Row

from slackwater.model.errors import RefusedError
from slackwater.model.ids import TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store import checkpoints as shelf
from slackwater.runtime.store.schema import (
    checkpoints,
    models,
    operations,
    samples,
    sampling_sessions,
    sessions,
)
from slackwater.serve.http.auth import tenant_reader
from slackwater.serve.http.large_bodies import LargeBodyRoute
from slackwater.serve.tinker.downloads import Downloads
from slackwater.serve.tinker.rest import RestFace, moment
from slackwater.serve.tinker.weight_files import RECIPIENTS, archived, encrypted, weight_files

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
_GIGABYTE = 1e9


def _audit(connection: Connection, tenant: TenantId, event_type: EventType) -> list[dict[str, Any]]:
    """What the tenant made and still has, oldest first."""
    kinds: list[tuple[str, sa.Table, str]] = [("checkpoint_created", checkpoints, "path")]
    if event_type == "all":
        kinds += [
            ("session_created", sessions, "session"),
            ("training_run_created", models, "model"),
        ]
    if event_type not in ("all", "checkpoints"):
        kinds = []
    found: list[tuple[float, str, str]] = []
    for event, table, column in kinds:
        query = sa.select(table.c.created_s, table.c[column]).where(table.c.tenant == tenant)
        found += [(row[0], event, row[1]) for row in connection.execute(query)]
    return [
        {
            "timestamp": moment(at_s),
            "event": event,
            "event_details": {"actor": tenant, "subject": subject},
        }
        for at_s, event, subject in sorted(found)
    ]


def _slice(row: Row[Any], lane: str, name: str, now_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "cat": row.status,
        "ph": "X",
        "ts": row.created_s * 1e6,
        "dur": ((row.finished_s or now_s) - row.created_s) * 1e6,
        "pid": 1,
        "tid": lane,
    }


def _timeline(connection: Connection, session: str) -> bytes:
    """A session's operations and samples, from asking to answer, as a trace that Perfetto opens."""
    now_s = time.time()
    ops = sa.select(operations).join(models, models.c.model == operations.c.model)
    drawn = sa.select(samples).join(
        sampling_sessions, sampling_sessions.c.sampling_session == samples.c.sampling_session
    )
    events = [
        _slice(row, row.model, row.kind, now_s)
        for row in connection.execute(ops.where(models.c.session == session))
    ]
    events += [
        _slice(row, row.sampling_session, "sample", now_s)
        for row in connection.execute(drawn.where(sampling_sessions.c.session == session))
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()


def record_routes(face: RestFace, downloads: Downloads) -> APIRouter:
    plane = face.plane
    router = APIRouter(route_class=LargeBodyRoute, prefix="/api/v1", tags=["tinker: records"])
    caller = Annotated[TenantId, Depends(tenant_reader(plane.tenants))]

    @router.get("/audit")
    async def audit(
        tenant: caller, event_type: EventType = "all", day: datetime.date | None = None
    ) -> dict[str, Any]:
        entries = await plane.store.call(lambda c: _audit(c, tenant, event_type))
        if day is not None:
            entries = [entry for entry in entries if entry["timestamp"].startswith(day.isoformat())]
        return {"entries": entries}

    @router.get("/billing/usage/events")
    async def usage(tenant: caller) -> dict[str, Any]:
        raise RefusedError(
            "billing: this service sends no bills and keeps no usage events; see /metrics for "
            "token counts"
        )

    @router.get("/billing/usage/checkpoints/current")
    async def storage(tenant: caller, project_id: str | None = None) -> dict[str, Any]:
        """Bytes by project; what several names share is counted under each."""
        held = await face.checkpoints(tenant)
        projects = {s["session_id"]: s["project_id"] for s in await plane.sessions.describe(tenant)}
        totals: dict[str | None, tuple[int, int]] = {}
        for item in held:
            project = projects.get(item.model.split(":")[0])
            count, size = totals.get(project, (0, 0))
            totals[project] = (count + 1, size + item.size_bytes)
        return {
            "data": [
                {
                    "project_id": project,
                    "org_user_urn": tenant,
                    "checkpoint_count": count,
                    "size_bytes": size,
                    "size_gigabytes": size / _GIGABYTE,
                }
                for project, (count, size) in totals.items()
                if project_id in (None, project)
            ]
        }

    @router.get("/sessions/{session_id}/trace_export")
    async def trace_export(request: Request, session_id: str, tenant: caller) -> dict[str, Any]:
        session = plane.sessions.get(tenant, session_id).session
        trace = await plane.store.call(lambda c: _timeline(c, session))
        return {"status": "ready", "url": downloads.offer(request, trace, f"{session}.json")[0]}

    @router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
    async def external_weights_urls(
        request: Request, run_id: str, kind: str, name: str, tenant: caller
    ) -> dict[str, Any]:
        files = await _exported(plane, downloads, tenant, f"tinker://{run_id}/{kind}/{name}")
        links = {file: downloads.offer(request, files[file], file) for file in files}
        ends_s = min(link[1] for link in links.values())
        return {"urls": {file: link[0] for file, link in links.items()}, "expires": moment(ends_s)}

    @router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/archive", status_code=302)
    async def archive(
        request: Request, run_id: str, kind: str, name: str, tenant: caller
    ) -> Response:
        """One tar of the same files, as older SDKs ask for them: this redirects to its link."""
        files = await _exported(plane, downloads, tenant, f"tinker://{run_id}/{kind}/{name}")
        target = downloads.new_folder() / f"{name}.tar"
        made = await asyncio.to_thread(archived, files, target)
        url, ends_s = downloads.offer(request, made, target.name)
        headers = {"location": url, "expires": formatdate(ends_s, usegmt=True)}
        return Response(status_code=302, headers=headers)

    return router


async def _exported(
    plane: ControlPlane, downloads: Downloads, tenant: TenantId, path: str
) -> dict[str, Path | bytes]:
    """The files of a checkpoint's export, encrypted where its recipients are named."""
    held = await plane.store.call(lambda c: shelf.find_checkpoint(c, tenant, path, time.time()))
    files = weight_files(held, plane.bases.get(held.base_model), plane.shelf)
    kept = (held.user_metadata or {}).get(RECIPIENTS)
    if kept is None:
        return files
    return await asyncio.to_thread(encrypted, files, kept, downloads.new_folder())
