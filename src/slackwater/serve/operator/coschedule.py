"""Permits over HTTP, for external jobs, `slackwater job` and `slackwater top`."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from slackwater.model.errors import RefusedError
from slackwater.model.ids import TenantId
from slackwater.model.placement import Phase
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.phases import PhaseService, stage_reply
from slackwater.serve.http.auth import Caller, require_operator
from slackwater.serve.tinker.bodies import Finite, RequestBody

HOLD_S = 30.0
PENDING: dict[int | str, dict[str, Any]] = {202: {"description": "Not yet; repeat the request."}}

Count = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[Finite, Field(ge=0)]


class EndBody(RequestBody):
    outcome: Literal["finished", "failed", "stopped"] = "stopped"
    reason: str = ""


class AskBody(RequestBody):
    phase: Phase
    iteration: Count


class ProgressBody(RequestBody):
    finished: Count = 0
    total: Count = 0
    tokens: Count = 0


class ReturnBody(RequestBody):
    work_s: Seconds


def coschedule_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/slackwater", tags=["co-scheduling"])

    def phases() -> PhaseService:
        if plane.phases is None:
            raise RefusedError(
                "this service has no co-scheduler: start it with [coschedule] in its configuration"
            )
        return plane.phases

    shared = Annotated[PhaseService, Depends(phases)]

    @router.delete("/jobs/{job}")
    async def end(job: str, body: EndBody, tenant: Caller, service: shared) -> dict[str, Any]:
        """End a job that its owner runs; another job may take its nodes."""
        return stage_reply(service.end(tenant, job, body.outcome, body.reason), job)

    @router.post("/jobs/{job}/alive")
    async def alive(job: str, tenant: Caller, service: shared) -> dict[str, Any]:
        """Heartbeat of a job's program, with or without a permit."""
        return stage_reply(service.record_heartbeat(tenant, job), job)

    @router.post("/jobs/{job}/permits", response_model=None, responses=PENDING)
    async def ask(job: str, body: AskBody, tenant: Caller, service: shared) -> Response:
        """Wait for a permit: 200 with it, or 202 after 30 s (repeat the same request)."""
        permit = await service.ask(tenant, job, body.phase, body.iteration, HOLD_S)
        if permit is None:
            return JSONResponse({"state": "waiting", "phase": body.phase.value}, 202)
        return JSONResponse(permit)

    @router.post("/jobs/{job}/permits/{permit}/progress")
    async def progress(
        job: str, permit: Count, body: ProgressBody, tenant: Caller, service: shared
    ) -> dict[str, Any]:
        """Heartbeat with the rollout's progress; `state` is `taken` if the permit was lost."""
        return service.progress(tenant, job, permit, body.finished, body.total, body.tokens)

    @router.delete("/jobs/{job}/permits/{permit}")
    async def give_back(
        job: str, permit: Count, body: ReturnBody, tenant: Caller, service: shared
    ) -> dict[str, Any]:
        """Return a permit: the phase has ended."""
        return service.give_back(tenant, job, permit, body.work_s)

    @router.get("/coschedule/timeline", response_model=None)
    async def timeline(tenant: Caller, service: shared) -> Response:
        """A Perfetto trace of the jobs that held each node."""
        require_operator(plane, tenant, "the fleet's timelines")
        return Response(service.timeline(), media_type="application/json")

    @router.get("/coschedule")
    async def state(tenant: Caller, service: shared) -> dict[str, Any]:
        """State of the shared fleet; only the operator sees other tenants' jobs by name."""
        state = service.state()
        return state if plane.is_operator(tenant) else visible_state(tenant, state)

    return router


def visible_state(tenant: TenantId, state: dict[str, Any]) -> dict[str, Any]:
    """The state without the names of other tenants' jobs."""
    jobs = [row for row in state["jobs"] if row["tenant"] == tenant]
    mine = {None, *(row["job"] for row in jobs)}
    nodes = [
        row
        | {field: row[field] if row[field] in mine else "another's" for field in ("job", "tail")}
        for row in state["nodes"]
    ]
    return state | {"jobs": jobs, "nodes": nodes}
