"""Jobs over HTTP: submit, list, show, stop, resume, and read the output of their drivers."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from slackwater.model.errors import RefusedError
from slackwater.model.ids import TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.submissions import MOST_LOG_BYTES
from slackwater.serve.http.auth import Caller, find_job_key

Offset = Annotated[int, Query(ge=-(1 << 53), le=1 << 53)]
ByteCount = Annotated[int, Query(ge=1, le=MOST_LOG_BYTES)]


def job_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/slackwater/jobs", tags=["jobs"])

    def operator(tenant: Caller, request: Request) -> TenantId:
        """Refuse all but the operator's own key: a submitted job runs commands on this machine."""
        if not plane.is_operator(tenant):
            owner = plane.settings.tenants[0]
            raise RefusedError(f"key: of {tenant}; only the operator, {owner}, may submit jobs")
        if find_job_key(plane.tenants, request.headers) is not None:
            raise RefusedError("key: of a job; submit jobs with the operator's own key")
        return tenant

    owner = Annotated[TenantId, Depends(operator)]

    @router.get("")
    async def jobs(tenant: Caller) -> dict[str, Any]:
        """The caller's jobs and their usage; the operator sees all jobs."""
        return {"jobs": plane.submissions.add_progress(plane.jobs.rows(tenant))}

    @router.post("", status_code=201)
    async def submit(
        body: dict[str, Any], tenant: Caller, request: Request, replace: bool = False
    ) -> dict[str, Any]:
        """Submit a job file as JSON; the job is durable when this returns.

        A job without a recipe or a command is run by its owner; any tenant may submit one.
        """
        if "recipe" in body or "command" in body:
            operator(tenant, request)
        return await plane.submissions.submit(tenant, body, replace=replace)

    @router.get("/{name}")
    async def job(name: str, tenant: Caller) -> dict[str, Any]:
        """A job's stage, usage, settings and driver."""
        return plane.submissions.describe(tenant, name)

    @router.get("/{name}/logs")
    async def logs(
        name: str, tenant: Caller, place: Offset = -65536, most: ByteCount = 65536
    ) -> dict[str, Any]:
        """Output of the job's drivers from byte `place` on; negative counts from the end."""
        return plane.submissions.log(tenant, name, place, most)

    @router.post("/{name}/stop", status_code=202)
    async def stop(name: str, tenant: owner) -> dict[str, Any]:
        """Stop a job's driver; its results stay."""
        return plane.submissions.stop(tenant, name)

    @router.post("/{name}/resume", status_code=202)
    async def resume(name: str, tenant: owner) -> dict[str, Any]:
        """Resume a job from its last complete iteration, as a new arrival."""
        return plane.submissions.resume(tenant, name)

    return router
