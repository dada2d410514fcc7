"""Metrics in the Prometheus text format, limited to what the caller may see."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slackwater.model.ids import TenantId
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.plane import ControlPlane
from slackwater.wire.memory import MEMORY_GAUGE, resident_bytes

# Size and health of the fleet: what a caller without a key may see.
FLEET = frozenset(
    {
        *("loop_longest_cpu_s", "loop_longest_lag_s"),
        *("engines", "trainers", "nodes", "sandboxes", "rollout_instances"),
    }
)
# Queue lengths over all tenants: they tell a tenant why its own work waits.
QUEUES = frozenset(
    {"rollout_live_turns", "rollout_waiting_turns", "waiting_operations", "actions_waiting"}
)


def tenant_gauges(plane: ControlPlane) -> dict[str, float]:
    """Gauges for tenants other than the operator: nothing that reveals another tenant's usage."""
    return {
        name: value for name, value in gauges_of(plane).items() if name in FLEET or name in QUEUES
    }


def gauges_of(plane: ControlPlane) -> dict[str, float]:
    """All gauges, for metrics and status."""
    waiting = plane.controller.operations.waiting()
    roles = plane.workers.names_by_role()
    longest_cpu_s, longest_lag_s = plane.loop_watch.longest()
    return {
        "loop_longest_cpu_s": longest_cpu_s,
        "loop_longest_lag_s": longest_lag_s,
        "engines": len(roles["engine"]),
        "trainers": len(roles["trainer"]),
        "nodes": len(plane.fleet.nodes.names()),
        "active_sessions": plane.sessions.count_active(),
        "open_models": len(waiting),
        "waiting_operations": sum(waiting.values()),
        "sampling_sessions": len(plane.sampling.sessions()),
        **plane.actions.gauges(),
        **plane.controller.gauges(),
        **plane.rentals.gauges(),
        **_serving_gauges(plane),
    }


def _serving_gauges(plane: ControlPlane) -> dict[str, float]:
    """Gauges of the served model's SLO and of lending."""
    rollout, now_s = plane.rollout, loop_time()
    slo_gauges = {} if rollout.slo is None else rollout.slo.gauges(now_s)
    return slo_gauges | ({} if rollout.lending is None else rollout.lending.gauges())


def serving_of(plane: ControlPlane) -> dict[str, Any] | None:
    """The serving SLO and its attainment per minute; None if no model is served."""
    tracker, lending = plane.rollout.slo, plane.rollout.lending
    if tracker is None:
        return None
    return {
        "model": tracker.model,
        "slo": asdict(tracker.slo),
        "minutes": tracker.minutes(),
        "lent": {} if lending is None else dict(lending.borrowers),
        "not_lent": {} if lending is None else dict(lending.refusals),
    }


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
