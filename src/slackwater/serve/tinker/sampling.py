"""Tinker API: sampling sessions, samples and futures."""

import secrets
import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from sqlalchemy.engine import Connection

from slackwater.model.errors import ConfigError
from slackwater.model.ids import RequestId, SamplingSessionId, TenantId
from slackwater.model.session import SamplingSession
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.outcomes import find_outcome
from slackwater.runtime.store import sampling_sessions
from slackwater.runtime.store.checkpoints import SAMPLER
from slackwater.serve.http.auth import Caller
from slackwater.serve.http.errors import GoneError
from slackwater.serve.http.large_bodies import LargeBodyRoute
from slackwater.serve.tinker import bodies
from slackwater.serve.tinker.checkpoints import read_checkpoint


async def _open_session(
    plane: ControlPlane, tenant: TenantId, body: bodies.CreateSamplingSessionBody
) -> SamplingSession:
    """Open a session on a weight snapshot; repeating a number returns the same session."""
    session = plane.sessions.get(tenant, body.session_id)
    if not plane.sessions.is_live(session.session):
        raise GoneError(f"session_id: {session.session!r} has ended")
    base_model, version, lineage = await _find_weights(plane, tenant, body)

    def write(connection: Connection) -> SamplingSession:
        seq = body.sampling_session_seq_id
        found = sampling_sessions.find_by_seq(connection, session.session, seq)
        if found is not None:
            return found
        number = sampling_sessions.count_of_lineage(connection, session.session, f"{lineage}|")
        name = SamplingSessionId(f"ss-{secrets.token_hex(12)}")
        weights = (base_model, version, f"{lineage}|client {number}", body.model_path)
        new = SamplingSession(name, tenant, session.session, *weights)
        sampling_sessions.add_sampling_session(connection, new, seq, time.time())
        return new

    opened = await plane.store.call(write)
    plane.sampling.add_session(opened)
    return opened


async def _find_weights(
    plane: ControlPlane, tenant: TenantId, body: bodies.CreateSamplingSessionBody
) -> tuple[str, str, str]:
    """Base model, weight version and lineage."""
    if (path := body.model_path) is not None:
        checkpoint = await read_checkpoint(plane, tenant, path)
        if checkpoint.kind != SAMPLER:
            raise ConfigError.of("model_path", path, "must be saved with save_weights_for_sampler")
        return checkpoint.base_model, checkpoint.held_as, checkpoint.lineage
    if body.base_model is None:
        raise ConfigError.of("base_model", None, "must be given, or model_path")
    base = plane.bases.get(body.base_model)
    return base.name, base.version, base.name


def sampling_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/api/v1", tags=["tinker: sampling"])

    @router.post("/create_sampling_session")
    async def create_sampling_session(
        body: bodies.CreateSamplingSessionBody, tenant: Caller
    ) -> dict[str, str]:
        opened = await _open_session(plane, tenant, body)
        return {"sampling_session_id": opened.sampling_session, "type": "create_sampling_session"}

    @router.post("/join_sampling_session")
    async def join(body: bodies.JoinSamplingSessionBody, tenant: Caller) -> dict[str, Any]:
        session = plane.sampling.session(tenant, body.sampling_session_id)
        number = await plane.store.call(
            lambda c: sampling_sessions.join_session(c, session.sampling_session)
        )
        return {"client_counter": number, "type": "join_sampling_session"}

    @router.get("/samplers/{sampler_id}")
    async def sampler(sampler_id: str, tenant: Caller) -> dict[str, Any]:
        session = plane.sampling.session(tenant, sampler_id)
        return {
            "sampler_id": session.sampling_session,
            "base_model": session.base_model,
            "model_path": session.model_path,
        }

    return router


def future_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/api/v1", tags=["tinker: futures"])

    @router.post("/retrieve_futures")
    async def retrieve_many(body: bodies.RetrieveFuturesBody, tenant: Caller) -> dict[str, Any]:
        session = plane.sampling.session(tenant, body.target.sampling_session_id)
        if body.retrieved_request_ids:
            await plane.sampling.acknowledge(
                session, [RequestId(name) for name in body.retrieved_request_ids]
            )
        hold_s = plane.settings.hold_s
        if body.timeout is not None:
            hold_s = min(hold_s, body.timeout)
        finished, cursor = await plane.sampling.finished.after(
            session.sampling_session, body.prev_cursor, hold_s
        )
        if not finished:
            plane.fail_unserved(session)  # the next call returns them as failed
        completions = [
            {"state": "failed", "request_id": done.request}
            if done.size_bytes is None
            else {
                "state": "finished",
                "request_id": done.request,
                "response_payload_uncompressed_size": done.size_bytes,
            }
            for done in finished
        ]
        return {"completions": completions, "cursor": cursor}

    @router.post("/cancel_future", status_code=204)
    async def cancel(body: bodies.CancelFutureBody, tenant: Caller) -> Response:
        """Cancel a sample; ended samples and training operations are not affected."""
        request = RequestId(body.request_id)
        # NotFoundError if it belongs to another tenant.
        await find_outcome(plane.store, plane.board, tenant, request, 0.0)
        plane.sampling.cancel(tenant, request)
        return Response(status_code=204)

    return router
