"""For whoever runs the service: health, metrics, status."""

from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from slackwater.model.ids import TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.http.auth import find_tenant, tenant_reader
from slackwater.serve.operator.gauges import gauges_of, serving_of


class PlaneCollector:
    """Reads the plane when Prometheus asks; nothing is counted twice."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def collect(self) -> list[Metric]:
        found: list[Metric] = []
        for name, value in gauges_of(self._plane).items():
            found.append(GaugeMetricFamily(f"slackwater_{name}", name.replace("_", " "), value))
        workers = GaugeMetricFamily(
            "slackwater_worker", "gauges of a worker", labels=["worker", "gauge"]
        )
        for worker, gauges in self._plane.rollout.gauges.items():
            for name, value in gauges.items():
                workers.add_metric([worker, name], value)
        return [*found, workers, *self._jobs()]

    def _jobs(self) -> list[Metric]:
        used = CounterMetricFamily(
            "slackwater_job", "what a job has used", labels=["job", "tenant", "what"]
        )
        stages = GaugeMetricFamily("slackwater_jobs", "jobs by stage", labels=["stage"])
        counted: Counter[str] = Counter()
        for entry in self._plane.brain.jobs.entries():
            counted[entry.stage.value] += 1
            for what, value in asdict(entry.account).items():
                used.add_metric([entry.job, entry.tenant, what], value)
        for stage, count in counted.items():
            stages.add_metric([stage], count)
        return [used, stages]


def operator_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(tags=["operator"])
    caller = Annotated[TenantId, Depends(tenant_reader(plane.tenants))]
    registry = CollectorRegistry()
    registry.register(PlaneCollector(plane))

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """For Prometheus. With the operator's key (`authorization`) also who did what, by tenant and model."""
        tenant = find_tenant(plane.tenants, request.headers)
        shown = generate_latest(registry)
        if tenant is not None and plane.is_operator(tenant):
            shown += generate_latest(plane.meters.registry)
        return Response(shown, media_type=CONTENT_TYPE_LATEST)

    @router.get("/slackwater/status")
    async def status(tenant: caller) -> dict[str, Any]:
        """What runs and what waits. Paths, processes and their errors are the operator's; the rest sees sizes."""
        failed = plane.fleet.supervisor.failed()
        if not plane.is_operator(tenant):
            return {
                "models": {base.name: "" for base in plane.bases},
                "workers": {role: len(names) for role, names in plane.workers.by_role().items()},
                "failed": dict.fromkeys(failed, "fails to start"),
                "gauges": gauges_of(plane),
            }
        return {
            "models": {base.name: str(base.directory) for base in plane.bases},
            "workers": plane.workers.by_role(),
            "trained_by": plane.training.holders(),
            "pids": plane.fleet.supervisor.pids(),
            "failed": {name: f"{one.deaths} times: {one.said}" for name, one in failed.items()},
            "gauges": gauges_of(plane),
            "serving": serving_of(plane),
        }

    return router
