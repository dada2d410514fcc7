"""Tinker API: audit log, storage, timelines and exports.

All data come from the durable store, so they cover writes, not reads.
"""

import asyncio
import datetime
import json
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import sqlalchemy as sa
from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from sqlalchemy.engine import Connection, Row

from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.model.ids import TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.schema import (
    checkpoints,
    models,
    operations,
    samples,
    sampling_sessions,
    sessions,
)
from slackwater.serve.http.auth import Caller
from slackwater.serve.http.large_bodies import LargeBodyRoute
from slackwater.serve.tinker.checkpoints import read_checkpoint, read_checkpoints
from slackwater.serve.tinker.rest import moment
from slackwater.serve.tinker.weight_files import (
    RECIPIENTS,
    encrypt_files,
    weight_files,
    write_archive,
)

LINK_LIVES_S = 3600.0
EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
_GIGABYTE = 1e9


Files = dict[str, Path | bytes]
Content = Path | bytes | Callable[[], Awaitable[bytes]]
Key = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class _Offer:
    content: Content
    name: str
    ends_s: float


@dataclass(slots=True)
class _PreparedFiles:
    folder: Path
    task: "asyncio.Task[Files]"
    ends_s: float = 0.0


class Downloads:
    """Expiring links, which a restart revokes; `scratch` holds files made for downloads.

    A repeated request gets the same link and the same files, so that repeating it cannot fill
    memory or disk. A `Key` identifies the content and starts with the tenant.
    """

    def __init__(self, scratch: Path) -> None:
        self._offers: dict[str, _Offer] = {}
        self._tokens: dict[tuple[Key, str], str] = {}
        self._scratch = scratch
        self._prepared: dict[Key, _PreparedFiles] = {}
        shutil.rmtree(scratch, ignore_errors=True)

    async def prepare(self, of: Key, make: Callable[[Path], Coroutine[Any, Any, Files]]) -> Files:
        """The files that `make` writes, made once for as long as they are requested."""
        now_s = time.time()
        for key in [key for key, entry in self._prepared.items() if entry.ends_s <= now_s]:
            self._remove(key)
        entry = self._prepared.get(of)
        if entry is None:
            folder = self._scratch / secrets.token_hex(12)
            entry = self._prepared[of] = _PreparedFiles(folder, asyncio.create_task(make(folder)))
        entry.ends_s = now_s + 2 * LINK_LIVES_S
        try:
            return await asyncio.shield(entry.task)  # other requests may wait for it
        except Exception:
            if self._prepared.get(of) is entry:
                self._remove(of)
            raise

    def _remove(self, of: Key) -> None:
        shutil.rmtree(self._prepared.pop(of).folder, ignore_errors=True)

    def offer(self, request: Request, of: Key, content: Content, name: str) -> tuple[str, float]:
        """A link to `content`, and when it expires."""
        now_s = time.time()
        token = self._tokens.get((of, name))
        if token is None:
            for key, old in tuple(self._tokens.items()):
                if self._offers[old].ends_s <= now_s:
                    del self._tokens[key], self._offers[old]
            token = self._tokens[of, name] = secrets.token_urlsafe(24)
        self._offers[token] = _Offer(content, name, now_s + LINK_LIVES_S)
        return f"{request.base_url}downloads/{token}/{quote(name)}", now_s + LINK_LIVES_S

    def take(self, token: str, name: str) -> Content:
        """The content of a link; the file name must match."""
        found = self._offers.get(token)
        if found is None or found.name != name or found.ends_s <= time.time():
            raise NotFoundError("download: the link is unknown or has expired; request a new one")
        return found.content


def download_routes(downloads: Downloads) -> APIRouter:
    router = APIRouter(tags=["downloads"])

    @router.get("/downloads/{token}/{name}")
    async def download(token: str, name: str) -> Response:
        content = downloads.take(token, name)
        if isinstance(content, Path):
            return FileResponse(content, filename=name)
        if not isinstance(content, bytes):
            content = await content()
        headers = {"content-disposition": f"attachment; filename*=utf-8''{quote(name)}"}
        return Response(content, media_type="application/json", headers=headers)

    return router


def _audit(connection: Connection, tenant: TenantId, event_type: EventType) -> list[dict[str, Any]]:
    """Creation events of what the tenant still has, oldest first."""
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
    """A Perfetto trace of a session's operations and samples, from request to result."""
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


def record_routes(plane: ControlPlane, downloads: Downloads) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/api/v1", tags=["tinker: records"])

    @router.get("/audit")
    async def audit(
        tenant: Caller, event_type: EventType = "all", day: datetime.date | None = None
    ) -> dict[str, Any]:
        entries = await plane.store.call(lambda c: _audit(c, tenant, event_type))
        if day is not None:
            entries = [entry for entry in entries if entry["timestamp"].startswith(day.isoformat())]
        return {"entries": entries}

    @router.get("/billing/usage/events")
    async def usage(tenant: Caller) -> dict[str, Any]:
        raise RefusedError(
            "billing: this service records no usage events; see /metrics for token counts"
        )

    @router.get("/billing/usage/checkpoints/current")
    async def storage(tenant: Caller, project_id: str | None = None) -> dict[str, Any]:
        """Bytes by project; files with several names count under each."""
        found = await read_checkpoints(plane, tenant)
        projects = {s["session_id"]: s["project_id"] for s in await plane.sessions.describe(tenant)}
        totals: dict[str | None, tuple[int, int]] = {}
        for item in found:
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
    async def trace_export(request: Request, session_id: str, tenant: Caller) -> dict[str, Any]:
        session = plane.sessions.get(tenant, session_id).session

        async def trace() -> bytes:
            return await plane.store.call(lambda c: _timeline(c, session))

        link, _ = downloads.offer(request, (tenant, "trace"), trace, f"{session}.json")
        return {"status": "ready", "url": link}

    @router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
    async def external_weights_urls(
        request: Request, run_id: str, kind: str, name: str, tenant: Caller
    ) -> dict[str, Any]:
        path = f"tinker://{run_id}/{kind}/{name}"
        key, files = await _export_files(plane, downloads, tenant, path)
        links = {file: downloads.offer(request, key, files[file], file) for file in files}
        ends_s = min(link[1] for link in links.values())
        return {"urls": {file: link[0] for file, link in links.items()}, "expires": moment(ends_s)}

    @router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/archive", status_code=302)
    async def archive(
        request: Request, run_id: str, kind: str, name: str, tenant: Caller
    ) -> Response:
        """Redirect to one tar of the same files, as older SDKs request them."""
        path = f"tinker://{run_id}/{kind}/{name}"
        key, files = await _export_files(plane, downloads, tenant, path)
        whole, work = (*key, "tar"), plane.fair_work.run
        made = await downloads.prepare(
            whole, partial(work, tenant, write_archive, files, f"{name}.tar")
        )
        url, ends_s = downloads.offer(request, whole, made[f"{name}.tar"], f"{name}.tar")
        headers = {"location": url, "expires": formatdate(ends_s, usegmt=True)}
        return Response(status_code=302, headers=headers)

    return router


async def _export_files(
    plane: ControlPlane, downloads: Downloads, tenant: TenantId, path: str
) -> tuple[Key, Files]:
    """The key and the files of a checkpoint's export, encrypted if it has recipients."""
    checkpoint = await read_checkpoint(plane, tenant, path)
    base = plane.bases.get(checkpoint.base_model)
    recipients = (checkpoint.user_metadata or {}).get(RECIPIENTS)

    def export(folder: Path) -> Files:
        files = weight_files(checkpoint, base, plane.shelf, folder)
        return files if recipients is None else encrypt_files(files, recipients, folder)

    key = (tenant, path, checkpoint.held_as, recipients)
    return key, await downloads.prepare(key, partial(plane.fair_work.run, tenant, export))
