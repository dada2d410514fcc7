"""Jobs over HTTP: submitted, listed, shown, stopped, resumed, and what their drivers print."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from slackwater.model.errors import RefusedError
from slackwater.model.ids import TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.submissions import MOST_LOG_BYTES
from slackwater.serve.http.auth import Caller, find_job_key

Place = Annotated[int, Query(ge=-(1 << 53), le=1 << 53)]
Most = Annotated[int, Query(ge=1, le=MOST_LOG_BYTES)]


def job_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/slackwater/jobs", tags=["jobs"])

    def operator(tenant: Caller, request: Request) -> TenantId:
        """Refuse all but the operator's own key: a submitted job runs commands on this machine."""
        if not plane.is_operator(tenant):
            who = plane.settings.tenants[0]
            raise RefusedError(
                f"key: of {tenant}; jobs are submitted by the operator, who is {who}"
            )
        if find_job_key(plane.tenants, request.headers) is not None:
            raise RefusedError("key: of a job; jobs are submitted with the operator's own")
        return tenant

    owner = Annotated[TenantId, Depends(operator)]

    @router.get("")
    async def jobs(tenant: Caller) -> dict[str, Any]:
        """The caller's jobs and their usage; the operator sees all jobs."""
        return {"jobs": plane.submissions.listed(plane.jobs.listed(tenant))}

    @router.post("", status_code=201)
    async def submit(
        body: dict[str, Any], tenant: Caller, request: Request, replace: bool = False
    ) -> dict[str, Any]:
        """Submit a job file as JSON; the job is durable when this returns.

        Without a recipe or a command the owner runs the driver, which any tenant may do.
        """
        if "recipe" in body or "command" in body:
            operator(tenant, request)
        return await plane.submissions.submit(tenant, body, replace=replace)

    @router.get("/{name}")
    async def job(name: str, tenant: Caller) -> dict[str, Any]:
        """Everything that is known of a job."""
        return plane.submissions.described(tenant, name)

    @router.get("/{name}/logs")
    async def logs(
        name: str, tenant: Caller, place: Place = -65536, most: Most = 65536
    ) -> dict[str, Any]:
        """Output of its drivers from `place` on; a negative place counts from the end."""
        return plane.submissions.log(tenant, name, place, most)

    @router.post("/{name}/stop", status_code=202)
    async def stop(name: str, tenant: owner) -> dict[str, Any]:
        """Stop its driver; its results stay."""
        return plane.submissions.stop(tenant, name)

    @router.post("/{name}/resume", status_code=202)
    async def resume(name: str, tenant: owner) -> dict[str, Any]:
        """Resume from its last complete iteration, as a new arrival."""
        return plane.submissions.resume(tenant, name)

    return router
