"""Permits that clients request over HTTP, and the state of the shared nodes."""

from collections.abc import Callable
from typing import Any

import msgspec

from slackwater.control.coschedule.managed_job import ManagedJob
from slackwater.control.coschedule.phase_controller import PhaseController
from slackwater.control.coschedule.phase_events import (
    PermitAsked,
    PermitProgress,
    PermitReturned,
    PermitsNumbered,
)
from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetEvent
from slackwater.control.jobs.events import JobEnded, JobHeard, JobSubmitted
from slackwater.control.jobs.registry import RegisteredJob
from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.model.ids import JobId, NodeId, TenantId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobStage, job_id_of
from slackwater.model.placement import Phase, overlap
from slackwater.runtime.executors.permits import PermitExecutor
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.net.background import Background
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.facts import SavedFact
from slackwater.timeline.perfetto import trace_json

_FACT = "coscheduled_jobs"
_SYNC_PERMITS = 1 << 40  # permits of syncs, which hold no nodes, have numbers above this


class _StoredHold(msgspec.Struct, frozen=True):
    permit: int
    phase: Phase


class _StoredJob(msgspec.Struct, frozen=True):
    """What a new control plane must know of a job whose own code requests permits."""

    job: JobId
    tenant: TenantId
    terms: JobTerms
    profile: JobProfile | None
    iterations_done: int
    hold: _StoredHold | None


class _StoredPhases(msgspec.Struct, frozen=True):
    jobs: list[_StoredJob]
    given: int


class PhaseService:
    """`fleet_nodes` names the fleet's node behind each of the co-scheduler's."""

    def __init__(
        self,
        settings: CoscheduleSettings,
        controller: FleetController,
        feed: Callable[[FleetEvent], None],
        fleet_nodes: dict[NodeId, str],
        executor: PermitExecutor,
        store: Store,
        background: Background,
    ) -> None:
        assert controller.phases is not None
        self._settings = settings
        self._controller = controller
        self._phases: PhaseController = controller.phases
        self._feed = feed
        self._fleet_nodes = fleet_nodes
        self._syncs = _SYNC_PERMITS
        self.executor = executor
        self._stored = SavedFact(store, background, _FACT, self._state_to_save)
        self.save_soon = self._stored.save_soon

    # ---- jobs ----
    def end(self, tenant: TenantId, name: str, outcome: Any, reason: str) -> RegisteredJob:
        entry = self._find_entry(tenant, name)
        self._feed(JobEnded(loop_time(), entry.job, outcome, reason))
        return entry

    def _find_entry(self, tenant: TenantId, name: str) -> RegisteredJob:
        entry = self._controller.jobs.find(job_id_of(tenant, name))
        if entry is None or entry.terms is None:
            raise NotFoundError(f"job: {name!r} is not submitted; POST /slackwater/jobs first")
        return entry

    def record_heartbeat(self, tenant: TenantId, name: str) -> RegisteredJob:
        """Record a heartbeat of a job's program between two phases."""
        entry = self._find_entry(tenant, name)
        self._feed(JobHeard(loop_time(), entry.job))
        return entry

    # ---- permits ----
    async def ask(
        self, tenant: TenantId, name: str, phase: Phase, iteration: int, hold_s: float
    ) -> dict[str, Any] | None:
        """Request a permit; None if it is not granted within `hold_s`. Asking again continues the
        same request.
        """
        entry = self.record_heartbeat(tenant, name)
        until_s = loop_time() + hold_s
        if phase is Phase.SYNC:  # it moves weights, and holds no devices
            self._syncs += 1
            self._find_live(entry)
            return _permit_reply(self._syncs, phase, (), False)
        while True:
            managed = self._find_live(entry)
            if managed.permit is not None:
                if managed.permit.phase is not phase:
                    raise RefusedError(
                        f"phase: job {name!r} holds permit {managed.permit.client_number} for its "
                        f"{managed.permit.phase} phase; give that back first"
                    )
                permit = managed.permit
                await self._stored.wait_until_saved()  # what was answered must survive a crash
                return _permit_reply(permit.client_number, phase, permit.nodes, permit.switch)
            self._feed(PermitAsked(loop_time(), entry.job, phase, iteration))
            # The event may grant the permit at once, and so may the end of the wait.
            if (managed.permit is None and not await self.executor.wait(entry.job, until_s)) and (
                managed.permit is None
            ):
                return None

    def _find_live(self, entry: RegisteredJob) -> ManagedJob:
        managed = self._phases.find(entry.job)
        if entry.stage.over or managed is None:
            raise RefusedError(f"job: {entry.job} is {entry.stage}: {entry.reason}")
        return managed

    def progress(
        self, tenant: TenantId, name: str, permit: int, finished: int, total: int, tokens: int
    ) -> dict[str, Any]:
        """Record progress of a permit's holder; `state` says whether it still has the permit."""
        entry = self.record_heartbeat(tenant, name)
        if permit > _SYNC_PERMITS:
            return {"permit": permit, "state": "held", "shrunk": False}
        self._feed(PermitProgress(loop_time(), entry.job, permit, finished, total, tokens))
        managed = self._phases.find(entry.job)
        current = None if managed is None else managed.permit
        if current is not None and current.client_number == permit:
            is_tail = current.tail_instances is not None
            return {"permit": permit, "state": "held", "shrunk": is_tail}
        why = self.executor.lost_permits.get(entry.job)
        reason = why[1] if why is not None and why[0] == permit else "it was given back"
        return {"permit": permit, "state": "taken", "reason": reason}

    def give_back(self, tenant: TenantId, name: str, permit: int, work_s: float) -> dict[str, Any]:
        """Return a permit; if it was lost meanwhile, the answer has the reason."""
        answer = self.progress(tenant, name, permit, 0, 0, 0)
        entry = self._find_entry(tenant, name)
        if permit <= _SYNC_PERMITS:
            self._feed(PermitReturned(loop_time(), entry.job, permit, work_s))
        return answer | {"state": "returned" if answer["state"] == "held" else "taken"}

    # ---- durable state ----
    def _state_to_save(self) -> _StoredPhases:
        jobs = []
        for entry in self._controller.jobs.entries():
            if entry.terms is None or entry.driven or entry.stage.over:
                continue
            managed = self._phases.find(entry.job)
            hold = None
            if managed is not None and managed.permit is not None and managed.requests_permits:
                hold = _StoredHold(managed.permit.client_number, managed.permit.phase)
            state = self._phases.scheduler.find(entry.job)
            profile = entry.profile
            if profile is not None and state is not None:
                profile = state.profile
            done = entry.iterations_done
            jobs.append(_StoredJob(entry.job, entry.tenant, entry.terms, profile, done, hold))
        return _StoredPhases(jobs, self._phases.scheduler.permits.last_number)

    async def adopt(self) -> None:
        """Adopt jobs and permits of the previous control plane; holders keep their permits."""
        stored = await self._stored.read(_StoredPhases)
        if stored is None:
            return
        self._feed(PermitsNumbered(loop_time(), stored.given))
        for row in stored.jobs:
            known = (row.profile, row.terms, row.iterations_done)
            self._feed(JobSubmitted(loop_time(), row.job, row.tenant, *known))
        for row in stored.jobs:
            if row.hold is not None:
                request = (row.hold.phase, row.iterations_done, row.hold.permit)
                self._feed(PermitAsked(loop_time(), row.job, *request))

    # ---- status ----
    def pause_reason(self, job: JobId) -> str | None:
        """Why a job's work waits for the co-scheduler; None if it does not."""
        entry, managed = self._controller.jobs.find(job), self._phases.find(job)
        if entry is not None and entry.stage is JobStage.HELD:
            return f"job {job} waits for a place: {entry.reason}"
        if managed is None or managed.requested_s is None:
            return None
        return (
            f"job {job} has waited {loop_time() - managed.requested_s:.0f} s for its turn on the "
            "nodes that it shares"
        )

    def timeline(self) -> bytes:
        drawn = self.executor.spans.timeline("live", "this service", loop_time())
        return b"".join(trace_json(drawn))

    def state(self) -> dict[str, Any]:
        """Pools, nodes, permits, waiting jobs, slowdowns against bounds, switches, utilisation."""
        now_s, spans = loop_time(), self.executor.spans
        nodes = [self._node(node, now_s) for node in self._fleet_nodes]
        pools = {}
        for pool in ("rollout", "train"):
            use = [
                spans.utilisation(node, now_s)
                for node in self._fleet_nodes
                if node.startswith(pool)
            ]
            busy = sum(row["job"] is not None for row in nodes if row["pool"] == pool)
            pools[pool] = {
                "nodes": len(use),
                "busy": busy,
                "utilisation": round(sum(use) / max(len(use), 1), 4),
            }
        return {
            "placement": self._settings.placement,
            "ordering": self._settings.order,
            "pools": pools,
            "nodes": nodes,
            "jobs": [
                self._job(entry, now_s)
                for entry in self._controller.jobs.entries()
                if entry.terms is not None
            ],
            "permits": {
                "given": self.executor.grants,
                "switches": self.executor.switches,
                "tail_migrations": self.executor.tails,
                "p50_ms": round(self.executor.grant_ms(0.5), 3),
                "p99_ms": round(self.executor.grant_ms(0.99), 3),
                "own_p99_ms": round(self.executor.grant_own_ms(0.99), 3),
            },
        }

    def _node(self, node: NodeId, now_s: float) -> dict[str, Any]:
        row: dict[str, Any] = {
            "node": node,
            "pool": node.rpartition("-")[0],
            "host": self._fleet_nodes[node],
            "job": None,
            "phase": None,
            "permit": None,
            "since_s": None,
            "tail": None,
            "utilisation": round(self.executor.spans.utilisation(node, now_s), 4),
        }
        for permit in self._phases.scheduler.permits.active():
            if not any(overlap(node, place) for place in permit.nodes):
                continue
            if permit.shrunk:
                row["tail"] = permit.job
                continue
            row |= {"job": permit.job, "phase": permit.phase.value, "permit": permit.number}
            row["since_s"] = round(now_s - permit.started_s, 3)
        return row

    def _job(self, entry: RegisteredJob, now_s: float) -> dict[str, Any]:
        assert entry.terms is not None
        managed, state = self._phases.find(entry.job), self._phases.scheduler.find(entry.job)
        placement = None if state is None else state.placement
        hold = None if managed is None else managed.permit
        waits_s = (
            None if managed is None or managed.requested_s is None else now_s - managed.requested_s
        )
        slowdown = self._phases.slowdown(entry.job, now_s)
        return {
            "job": entry.job,
            "tenant": entry.tenant,
            "stage": entry.stage.value,
            "reason": entry.reason,
            "group": None if placement is None else placement.group,
            "iterations_done": entry.iterations_done,
            "iterations": entry.terms.iterations,
            "slo": entry.terms.slo,
            "slo_scope": entry.terms.slo_scope,
            "bound": round(entry.terms.bound, 4),
            "slowdown": None if slowdown is None else round(slowdown, 4),
            "iterations_over_bound": 0 if state is None else state.iterations_over,
            "phase": None if hold is None else hold.phase.value,
            "permit": None if hold is None else hold.client_number,
            "nodes": [] if hold is None else list(hold.nodes),
            "holds_s": None if hold is None else round(now_s - hold.started_s, 3),
            "waits_s": None if waits_s is None else round(waits_s, 3),
            "switches": 0 if managed is None else managed.switches,
            "profile": None if state is None else msgspec.to_builtins(state.profile),
        }


def _permit_reply(
    permit: int, phase: Phase, nodes: tuple[NodeId, ...], switch: bool
) -> dict[str, Any]:
    return {"permit": permit, "phase": phase.value, "nodes": list(nodes), "switch": switch}


def stage_reply(entry: RegisteredJob, name: str) -> dict[str, Any]:
    refused = entry.stage is JobStage.REFUSED
    return {
        "job": name,
        "stage": entry.stage.value,
        "reason": entry.reason,
        "admitted": not refused,
        "iterations_done": entry.iterations_done,
    }
