"""The control plane in numbers: what runs, what waits, and how a served model's promise was kept."""

import asyncio
from dataclasses import asdict
from typing import Any

from slackwater.runtime.plane import ControlPlane


def gauges_of(plane: ControlPlane) -> dict[str, float]:
    """For metrics and status."""
    waiting = plane.training.waiting()
    roles = plane.workers.by_role()
    held_cpu_s, held_s = plane.loop_watch.longest()
    return {
        "loop_longest_cpu_s": held_cpu_s,
        "loop_longest_lag_s": held_s,
        "engines": len(roles["engine"]),
        "trainers": len(roles["trainer"]),
        "nodes": len(plane.fleet.nodes.names()),
        "active_sessions": plane.sessions.active(),
        "open_models": len(waiting),
        "waiting_operations": sum(waiting.values()),
        "sampling_sessions": len(plane.sampling.sessions()),
        **plane.actions.gauges(),
        **plane.brain.gauges(),
        **_serving_gauges(plane),
    }


def _serving_gauges(plane: ControlPlane) -> dict[str, float]:
    """What users of the served model got, what its workers saw of it, and what is lent."""
    rollout, now_s = plane.rollout, asyncio.get_running_loop().time()
    kept = {} if rollout.promise is None else rollout.promise.gauges(now_s)
    return kept | ({} if rollout.lending is None else rollout.lending.gauges())


def serving_of(plane: ControlPlane) -> dict[str, Any] | None:
    """The promise of the served model and how it was kept, minute by minute; None if none is served."""
    promise, lending = plane.rollout.promise, plane.rollout.lending
    if promise is None:
        return None
    return {
        "model": promise.model,
        "slo": asdict(promise.slo),
        "minutes": promise.minutes(),
        "lent": {} if lending is None else lending.lent(),
        "not_lent": {} if lending is None else dict(lending.refusals),
    }
