"""Tinker API: open, keep alive, end, list and search sessions."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from slackwater.model.errors import RefusedError
from slackwater.model.ids import TenantId
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.checkpoints import Checkpoint
from slackwater.serve.http.auth import Caller, find_job
from slackwater.serve.http.errors import GoneError
from slackwater.serve.http.large_bodies import LargeBodyRoute
from slackwater.serve.tinker import bodies
from slackwater.serve.tinker.checkpoints import read_checkpoints
from slackwater.serve.tinker.rest import Limit, Offset, Scope, list_runs, moment, page_of

JOB_KEY = "slackwater_job"  # of a session's user_metadata


def session_life_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/api/v1", tags=["tinker: service"])

    @router.post("/create_session")
    async def create_session(
        body: bodies.CreateSessionBody, tenant: Caller, request: Request
    ) -> dict[str, str]:
        named = find_job(plane.tenants, request.headers)
        job = named or (body.user_metadata or {}).get(JOB_KEY)
        described = {
            "job": job,
            "tags": body.tags,
            "user_metadata": body.user_metadata,
            "display_name": body.display_name,
            "project_id": body.project_id,
        }
        session = await plane.sessions.open(tenant, described, loop_time())
        plane.jobs.record_activity(plane.sessions.job_of(session), tenant)
        return {"session_id": session}

    @router.post("/session_heartbeat")
    async def heartbeat(body: bodies.HeartbeatBody, tenant: Caller) -> dict[str, str]:
        session = plane.sessions.get(tenant, body.session_id).session
        if not plane.sessions.is_live(session):
            raise GoneError(f"session_id: {session!r} has ended")
        plane.sessions.record_heartbeat(session, loop_time())
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session_id}/finish", status_code=204)
    async def finish(session_id: str, body: bodies.FinishBody, tenant: Caller) -> Response:
        session = plane.sessions.get(tenant, session_id).session
        if plane.sessions.is_live(session):
            status = {
                "type": "client_finished",
                "reason": {"type": body.reason.type},
                "detail": body.detail,
            }
            reason = f"session {session} was finished by its client"
            await plane.end_session(session, status, reason)
        return Response(status_code=204)

    return router


def session_list_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/api/v1", tags=["tinker: what there is"])

    @router.get("/sessions")
    async def sessions(
        tenant: Caller, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
    ) -> dict[str, Any]:
        page, _ = page_of(await plane.sessions.describe(tenant), limit, offset)
        return {"sessions": [item["session_id"] for item in page]}

    @router.get("/sessions/{session_id}")
    async def session(
        session_id: str, tenant: Caller, access_scope: Scope = "owned"
    ) -> dict[str, Any]:
        found = plane.sessions.get(tenant, session_id).session
        descriptions = await plane.sessions.describe(tenant)
        own = next(item for item in descriptions if item["session_id"] == found)
        runs = [r["training_run_id"] for r in await list_runs(plane, tenant)]
        samplers = [s for s in plane.sampling.sessions() if s.session == found]
        return {
            "training_run_ids": [run for run in runs if run.startswith(f"{found}:")],
            "sampler_ids": [sampler.sampling_session for sampler in samplers],
            "user_metadata": own["user_metadata"],
            "display_name": own["display_name"],
        }

    @router.put("/sessions/{session_id}/project", status_code=204)
    async def assign_project(session_id: str, body: bodies.ProjectBody, tenant: Caller) -> Response:
        found = plane.sessions.get(tenant, session_id).session
        await plane.sessions.update_description(found, project_id=body.project_id)
        return Response(status_code=204)

    @router.post("/sessions/search")
    async def search(body: bodies.SearchBody, tenant: Caller) -> dict[str, Any]:
        if body.owner.type != "own":
            raise RefusedError("owner: only your own sessions can be searched here")
        checkpoints = await read_checkpoints(plane, tenant)
        found = [s for s in await plane.sessions.describe(tenant) if body.matches(s)]
        page = found[: body.limit]
        last = page[-1] if len(found) > len(page) else None
        return {
            "sessions": [_summary(item, tenant, checkpoints) for item in page],
            "next_cursor": None
            if last is None
            else {
                "last_created_at": moment(last["created_s"]),
                "last_session_id": last["session_id"],
            },
        }

    return router


def _summary(
    session: dict[str, Any], tenant: TenantId, checkpoints: list[Checkpoint]
) -> dict[str, Any]:
    own = [item for item in checkpoints if item.model.startswith(f"{session['session_id']}:")]
    return {
        "session_id": session["session_id"],
        "created_at": moment(session["created_s"]),
        "owner": tenant,
        "project_id": session["project_id"] or "default",
        "status": session["status"],
        "checkpoints_count": len(own),
        "display_name": session["display_name"],
        "user_metadata": session["user_metadata"],
        "checkpoint_storage_bytes": sum(item.size_bytes for item in own),
    }
