"""Permits over HTTP, for external jobs, `slackwater job` and `slackwater top`."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from slackwater.model.errors import RefusedError
from slackwater.model.ids import TenantId
from slackwater.model.placement import Phase
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.phases import PhaseService, answered
from slackwater.serve.http.auth import Caller, require_operator
from slackwater.serve.tinker.bodies import Finite, RequestBody

HOLD_S = 30.0
LATER: dict[int | str, dict[str, Any]] = {202: {"description": "Not yet: ask again."}}

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

    service = Annotated[PhaseService, Depends(phases)]

    @router.delete("/jobs/{job}")
    async def end(job: str, body: EndBody, tenant: Caller, found: service) -> dict[str, Any]:
        """The owner is done with it: another job may have its place."""
        return answered(found.end(tenant, job, body.outcome, body.reason), job)

    @router.post("/jobs/{job}/alive")
    async def alive(job: str, tenant: Caller, found: service) -> dict[str, Any]:
        """Its program lives, whether it holds a permit or not."""
        return answered(found.alive(tenant, job), job)

    @router.post("/jobs/{job}/permits", response_model=None, responses=LATER)
    async def ask(job: str, body: AskBody, tenant: Caller, found: service) -> Response:
        """Wait for a permit: 200 with it, or 202 after 30 s (repeat the same request)."""
        permit = await found.ask(tenant, job, body.phase, body.iteration, HOLD_S)
        if permit is None:
            return JSONResponse({"state": "waiting", "phase": body.phase.value}, 202)
        return JSONResponse(permit)

    @router.post("/jobs/{job}/permits/{permit}/progress")
    async def progress(
        job: str, permit: Count, body: ProgressBody, tenant: Caller, found: service
    ) -> dict[str, Any]:
        """Heartbeat with the rollout's progress; `state` is `taken` if the permit was lost."""
        return found.progress(tenant, job, permit, body.finished, body.total, body.tokens)

    @router.delete("/jobs/{job}/permits/{permit}")
    async def give_back(
        job: str, permit: Count, body: ReturnBody, tenant: Caller, found: service
    ) -> dict[str, Any]:
        """The phase is over."""
        return found.give_back(tenant, job, permit, body.work_s)

    @router.get("/coschedule/timeline", response_model=None)
    async def timeline(tenant: Caller, found: service) -> Response:
        """Which job held which node when, as a Perfetto trace."""
        require_operator(plane, tenant, "the fleet's timelines")
        return Response(found.timeline(), media_type="application/json")

    @router.get("/coschedule")
    async def state(tenant: Caller, found: service) -> dict[str, Any]:
        """How the shared fleet stands; others' jobs are the operator's to see by name."""
        whole = found.state()
        return whole if plane.is_operator(tenant) else visible_state(tenant, whole)

    return router


def visible_state(tenant: TenantId, whole: dict[str, Any]) -> dict[str, Any]:
    """The same state without what is others'."""
    jobs = [row for row in whole["jobs"] if row["tenant"] == tenant]
    mine = {None, *(row["job"] for row in jobs)}
    nodes = [
        row
        | {field: row[field] if row[field] in mine else "another's" for field in ("job", "tail")}
        for row in whole["nodes"]
    ]
    return whole | {"jobs": jobs, "nodes": nodes}
