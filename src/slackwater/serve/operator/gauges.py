"""Gauges of the control plane and the attainment of the serving SLO."""

from dataclasses import asdict
from typing import Any

from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.plane import ControlPlane

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
    waiting = plane.training.waiting_by_model()
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
    promise, lending = plane.rollout.slo, plane.rollout.lending
    if promise is None:
        return None
    return {
        "model": promise.model,
        "slo": asdict(promise.slo),
        "minutes": promise.minutes(),
        "lent": {} if lending is None else lending.loans_by_worker(),
        "not_lent": {} if lending is None else dict(lending.refusals),
    }
