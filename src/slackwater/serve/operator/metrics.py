"""Metrics in the Prometheus text format, limited to what the caller may see."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slackwater.model.ids import TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.operator.gauges import FLEET, gauges_of
from slackwater.wire.memory import MEMORY_GAUGE, resident_bytes


class _PlaneCollector(Collector):
    """Reads the control plane on each scrape.

    With `everything` (the operator) it yields all series. Tenants get the fleet's gauges and the
    series with their own tenant label.
    """

    def __init__(self, plane: ControlPlane, tenant: TenantId | None, *, everything: bool) -> None:
        self._plane = plane
        self._tenant = tenant
        self._everything = everything

    def collect(self) -> Iterable[Metric]:
        for name, value in gauges_of(self._plane).items():
            if self._everything or name in FLEET:
                yield GaugeMetricFamily(f"slackwater_{name}", name.replace("_", " "), value)
        if self._everything:
            yield self._workers()
            yield self._memory()
            yield self._stages()
        if self._tenant is not None:
            for metric in (self._jobs(), *self._plane.meters.collect()):
                if (visible := self._visible(metric)) is not None:
                    yield visible

    def _visible(self, metric: Metric) -> Metric | None:
        if self._everything:
            return metric
        own = Metric(metric.name, metric.documentation, metric.type, metric.unit)
        own.samples = [each for each in metric.samples if each.labels.get("tenant") == self._tenant]
        return own if own.samples else None

    def _workers(self) -> Metric:
        found = GaugeMetricFamily(
            "slackwater_worker", "gauges of a worker", labels=["worker", "gauge"]
        )
        for worker, gauges in self._plane.rollout.gauges.items():
            for name, value in gauges.items():
                if name != MEMORY_GAUGE:  # it has its own series
                    found.add_metric([worker, name], value)
        return found

    def _memory(self) -> Metric:
        found = GaugeMetricFamily(
            "slackwater_worker_memory_bytes", "resident memory of a process", labels=["worker"]
        )
        found.add_metric(["plane"], resident_bytes())
        for worker, size_bytes in sorted(self._plane.workers.memory().items()):
            found.add_metric([worker], size_bytes)
        return found

    def _stages(self) -> Metric:
        found = GaugeMetricFamily("slackwater_jobs", "jobs by stage", labels=["stage"])
        counts = Counter(entry.stage.value for entry in self._plane.controller.jobs.entries())
        for stage, count in counts.items():
            found.add_metric([stage], count)
        return found

    def _jobs(self) -> Metric:
        found = CounterMetricFamily(
            "slackwater_job", "what a job has used", labels=["job", "tenant", "what"]
        )
        for entry in self._plane.controller.jobs.entries():
            for what, value in asdict(entry.account).items():
                found.add_metric([entry.job, entry.tenant, what], value)
        return found


def exposition(plane: ControlPlane, tenant: TenantId | None, *, everything: bool) -> bytes:
    """The metrics text for a tenant, or for a caller without a key (None)."""
    registry = CollectorRegistry()
    registry.register(_PlaneCollector(plane, tenant, everything=everything))
    return generate_latest(registry)
