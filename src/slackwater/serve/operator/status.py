"""Operator endpoints: health, metrics, status."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from slackwater.model.errors import RefusedError
from slackwater.model.ids import TenantId
from slackwater.model.instance import InstanceState
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.workload_traces import TraceKind
from slackwater.serve.http.auth import Caller, find_job_key, find_tenant, require_operator
from slackwater.serve.operator.metrics import exposition, gauges_of, serving_of, tenant_gauges

_FAILING_DEATHS = 3
_NOT_UP = ("starting", InstanceState.JOINING.value, InstanceState.PULLING.value)


def problems_of(plane: ControlPlane, tenant: TenantId) -> list[str]:
    """Models and training that cannot run; for the operator also failed workers and lost nodes."""
    models = (plane.breakdowns.engine_failure(base.name, tenant) for base in plane.bases)
    problems = [f"{why}; requests get 503" for why in models if why is not None]
    if (why := plane.breakdowns.trainer_failure(tenant)) is not None:
        problems.append(f"{why}; training requests get 503")
    if plane.is_operator(tenant):
        problems += map(str, plane.fleet.supervisor.failures().values())
        for node, deaths in plane.fleet.nodes_away().items():
            if deaths is None:
                problems.append(f"node {node} is away: its agent has not joined")
            elif deaths >= _FAILING_DEATHS:
                log = plane.settings.state / "logs" / f"agent-{node}.log"
                problems.append(f"node {node}: its agent ended {deaths} times in a row; see {log}")
    return problems


def starting_workers(plane: ControlPlane) -> list[str]:
    """Workers that were started, or will be, and have not joined yet."""
    rows = plane.instances.rows()
    names = {str(row["instance"]) for row in rows if row["state"] in _NOT_UP}
    names |= set(plane.fleet.supervisor.starting())
    for node, deaths in plane.fleet.nodes_away().items():
        if deaths is not None and deaths < _FAILING_DEATHS:
            names.add(f"agent of node {node}")
    return sorted(names)


def operator_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(tags=["operator"])

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Fleet gauges without a key; a tenant's series with its key; all with the operator's."""
        tenant = find_tenant(plane.tenants, request.headers)
        is_job = find_job_key(plane.tenants, request.headers) is not None
        everything = tenant is not None and plane.is_operator(tenant) and not is_job
        text = exposition(plane, tenant, everything=everything)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @router.get("/slackwater/status")
    async def status(tenant: Caller) -> dict[str, Any]:
        """What runs and waits: for tenants the fleet's size and queues, for the operator all."""
        failed = plane.fleet.supervisor.failures()
        if not plane.is_operator(tenant):
            return {
                "models": {base.name: "" for base in plane.bases},
                "workers": {
                    role: len(names) for role, names in plane.workers.names_by_role().items()
                },
                "failed": dict.fromkeys(failed, "fails to start"),
                "gauges": tenant_gauges(plane),
                "problems": problems_of(plane, tenant),
            }
        return {
            "models": {base.name: str(base.directory) for base in plane.bases},
            "workers": plane.workers.names_by_role(),
            "trained_by": plane.controller.operations.holders(),
            "pids": plane.fleet.supervisor.pids(),
            "failed": {
                name: f"{fault.deaths} times: {fault.error}" for name, fault in failed.items()
            },
            "gauges": gauges_of(plane),
            "serving": serving_of(plane),
            "tokens": plane.controller.rollout.tokens_by_source(),
            "problems": problems_of(plane, tenant),
            "starting": starting_workers(plane),
            "instances": plane.instances.rows(),
            "nodes": plane.fleet.rows(),
            "jobs": plane.submissions.add_progress(plane.jobs.rows(tenant)),
        }

    @router.get("/slackwater/traces/{kind}")
    async def traces(kind: TraceKind, request: Request, tenant: Caller) -> Response:
        """The last week of served requests, or of spot engines, as CSV; operator only."""
        require_operator(plane, tenant, "traces")
        if find_job_key(plane.tenants, request.headers) is not None:
            raise RefusedError("key: of a job; read traces with the operator's own key")
        text = await asyncio.to_thread(lambda: b"".join(plane.traces.trace(kind)))
        return Response(text, media_type="text/csv")

    return router
