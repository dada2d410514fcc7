"""The co-scheduler: admits jobs, grants permits for their phases, and keeps every admitted job
within its SLO.

Placement policies decide which jobs share which nodes, orderings decide which phase runs next. Late
and repeated messages (an old epoch, a permit that was released) change nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slackwater.control.coschedule.admission import Admission
from slackwater.control.coschedule.commands import (
    Command,
    HoldJob,
    RefuseJob,
    ShrinkRollout,
    StopJob,
)
from slackwater.control.coschedule.config import CoScheduleConfig
from slackwater.control.coschedule.events import (
    Event,
    JobArrived,
    JobCrashReported,
    JobFinished,
    JobRests,
    JobYields,
    NodeLost,
    PhaseFinished,
    PhaseRequested,
    ProfilingAsked,
    TailReached,
)
from slackwater.control.coschedule.groups import Groups
from slackwater.control.coschedule.job_state import JobState, JobStatus
from slackwater.control.coschedule.permits import Permits
from slackwater.control.coschedule.placement_table import PlacementTable
from slackwater.control.coschedule.slo_guard import SloGuard
from slackwater.control.coschedule.unprofiled_jobs import UnprofiledJobs
from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile
from slackwater.model.placement import Phase
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.interface import PlacementPolicy

_OVER = (JobStatus.FINISHED, JobStatus.REFUSED)
# Placements of their instant stay pending. Others need the nodes as they will be.
_DECIDING = (JobArrived, PhaseRequested, TimerFired)


class CoScheduler:
    """A state machine without I/O over one fleet."""

    def __init__(
        self, policy: PlacementPolicy, fleet: FleetView, config: CoScheduleConfig | None = None
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._config = config or CoScheduleConfig()
        self._permits = Permits()
        self._groups = Groups(self._config, fleet, self._permits)
        self._guard = SloGuard(self._config, fleet, self._groups)
        self._unprofiled = UnprofiledJobs(fleet, self._permits, self._groups, self._guard)
        self._jobs: dict[JobId, JobState] = {}
        self._places = PlacementTable(
            policy, self._jobs, self._groups, self._permits, self._unprofiled
        )
        self._admission = Admission(policy, fleet, self._config, self._places, self._guard)
        self._handlers: dict[type, Callable[[Any], list[Command]]] = {
            JobArrived: self._on_arrived,
            ProfilingAsked: self._on_profiling,
            PhaseRequested: self._on_requested,
            PhaseFinished: self._on_finished_phase,
            TailReached: self._on_tail,
            JobRests: self._on_rests,
            JobYields: self._on_yields,
            JobFinished: self._on_finished_job,
            JobCrashReported: self._on_crashed,
            NodeLost: self._on_node_lost,
            TimerFired: self._admission.on_timer,
        }

    def handle(self, event: Event) -> Sequence[Command]:
        """Take one event; return what the runtime must do about it, in order."""
        reserved = tuple(self._permits.reserved)
        commands: list[Command] = []
        decides = isinstance(event, _DECIDING)
        if self._admission.has_pending_placements(event.now_s if decides else None):
            commands.extend(self._admission.apply_pending(event.now_s))
        commands.extend(self._handlers[type(event)](event))
        if self._groups.misfits and not self._admission.has_pending_placements():
            commands.extend(self._isolate_misfits(event.now_s))
        if reserved or self._unprofiled:
            commands.extend(self._serve_unprofiled(reserved, event.now_s))
        return commands

    def _serve_unprofiled(self, reserved: tuple[NodeId, ...], now_s: float) -> list[Command]:
        """Grant permits to unprofiled jobs, and to members on nodes whose reservation ended."""
        commands: list[Command] = list(self._unprofiled.grant(now_s))
        released = tuple(node for node in reserved if node not in self._permits.reserved)
        commands.extend(self._places.grant(released, now_s))
        self._unprofiled.reserve_nodes(now_s)
        return commands

    def job(self, job: JobId) -> JobState:
        """The caller must not change it."""
        return self._jobs[job]

    def find(self, job: JobId) -> JobState | None:
        """The caller must not change it."""
        return self._jobs.get(job)

    def next_phase(self, job: JobId) -> Phase | None:
        """The phase that a placed or an unprofiled job may request; None for any other job."""
        if job in self._unprofiled:
            return self._unprofiled.next_phase(job)
        state = self._places.placed.get(job)
        return None if state is None else state.next_phase

    def is_unprofiled(self, job: JobId) -> bool:
        """Whether the job runs without a profile, to be measured."""
        return job in self._unprofiled

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """All nodes that jobs can be placed on."""
        return self._fleet.nodes

    @property
    def places(self) -> tuple[NodeId, ...]:
        """Where deployments can be: nodes, or the smallest parts of nodes that jobs can have."""
        return tuple(
            place
            for pool in (self._fleet.rollout, self._fleet.train)
            for place in self._fleet.list_places(
                pool.role, pool.least_devices if pool.least_devices > 1 else 0
            )
        )

    @property
    def permits(self) -> Permits:
        """The caller must not change them."""
        return self._permits

    @property
    def has_held_jobs(self) -> bool:
        """Whether any job waits for a place."""
        return bool(self._admission.held)

    def has_waiters(self, job: JobId, nodes: tuple[NodeId, ...]) -> bool:
        """Whether another job waits for one of the nodes that this one holds, or for its turn after
        this one's.
        """
        state = self._places.placed.get(job)
        if state is not None and self._groups.has_other_waiters(state):
            return True
        return self._groups.has_request_for(nodes, job) or self._unprofiled.has_request_for(
            nodes, job
        )

    def is_rollout_blocked(self, job: JobId) -> bool:
        """Whether another job holds nodes of the job's rollouts."""
        state = self._places.placed.get(job)
        placement = None if state is None else state.placement
        return placement is not None and self._permits.is_held_by_other(
            placement.rollout_nodes, job
        )

    def must_yield(self, job: JobId, *, at_boundary: bool) -> bool:
        """Whether an unprofiled job has nodes that a member of a group waits for: how long its
        phase will take is unknown. Nodes that were reserved for it are its own until the next
        boundary, where a step or a turn has ended.
        """
        if job not in self._unprofiled or not (
            at_boundary or not self._unprofiled.uses_reserved_nodes(job)
        ):
            return False
        permit = self._permits.find_by_job(job)
        return permit is not None and self._groups.has_request_for(permit.nodes, job)

    def skip_phase(self, job: JobId) -> None:
        """Let an unprofiled job that has nothing to do in its next phase skip it."""
        self._unprofiled.advance_phase(job, self._unprofiled.next_phase(job))

    # ---- jobs that come and go ----

    def _on_arrived(self, event: JobArrived) -> list[Command]:
        state = self._jobs.get(event.spec.job)
        spec = replace(event.spec, profile=self._fleet.with_node_counts(event.spec.profile))
        if state is None:
            state = self._jobs[event.spec.job] = JobState(spec, self._fleet.parts(spec.profile))
        elif state.status in _OVER and event.spec.arrival_s > state.spec.arrival_s:
            size = self._fleet.parts(spec.profile)
            state = self._jobs[event.spec.job] = JobState(spec, size, crashes=event.crashes)
        elif state.status is not JobStatus.SUSPENDED or event.crashes != state.crashes:
            return []
        self._unprofiled.leave(event.spec.job)
        state.iterations_done = event.iterations_done
        state.next_phase = Phase.ROLLOUT
        return self._admission.arrive(state, event.now_s, others_follow=event.others_follow)

    def _on_profiling(self, event: ProfilingAsked) -> list[Command]:
        if event.job in self._unprofiled or event.job in self._places.placed:
            return []
        demand = self._fleet.with_node_counts(
            JobProfile(
                rollout_s=1.0,  # its phases are yet to be measured
                train_s=1.0,
                rollout_nodes=event.rollout_nodes,
                train_nodes=event.train_nodes,
                rollout_devices=event.rollout_devices,
                train_devices=event.train_devices,
            )
        )
        reason = self._unprofiled.never_reason(demand)
        if reason is not None:
            return [RefuseJob(event.job, reason)]
        self._unprofiled.enter(event.job, demand)
        return []

    def _on_finished_job(self, event: JobFinished) -> list[Command]:
        if event.job in self._unprofiled:
            return self._remove_unprofiled(event)
        held = self._admission.held.get(event.job)
        if held is not None and event.epoch == held.epoch:
            del self._admission.held[event.job]
            held.status = JobStatus.FINISHED
            return []
        state = self._places.current(event.job, event.epoch)
        if state is None:
            return []
        state.status = JobStatus.FINISHED
        return self._admission.depart([state], event.now_s)

    def _remove_unprofiled(self, event: JobCrashReported | JobFinished) -> list[Command]:
        """Without a placement the job has no epoch: a message that names one came late."""
        if event.epoch:
            return []
        permit = self._permits.find_by_job(event.job)
        self._unprofiled.leave(event.job)
        if permit is None:
            return []
        self._permits.release(permit)
        return self._places.grant(permit.nodes, event.now_s)

    def _on_crashed(self, event: JobCrashReported) -> list[Command]:
        if event.job in self._unprofiled:
            return self._remove_unprofiled(event)
        state = self._places.current(event.job, event.epoch)
        if state is None:
            return []
        self._suspend(state)
        return self._admission.depart([state], event.now_s)

    def _on_node_lost(self, event: NodeLost) -> list[Command]:
        affected = [
            state
            for state in self._places.placed.values()
            if state.placement is not None and state.placement.uses(event.node)
        ]
        commands: list[Command] = []
        for state in affected:
            self._suspend(state)
            commands.append(StopJob(state.spec.job, state.epoch, False, f"{event.node} is lost"))
        if affected:
            commands.extend(self._admission.depart(affected, event.now_s))
        return commands

    def _suspend(self, state: JobState) -> None:
        """Suspend a job that crashed: it repeats the broken iteration, off its SLO clock."""
        state.status = JobStatus.SUSPENDED
        state.crashes += 1
        state.spent_s, state.clock_since_s = state.iteration_began_s, None
        state.is_resting = False

    # ---- phases ----

    def _on_requested(self, event: PhaseRequested) -> list[Command]:
        if event.job in self._unprofiled:
            if self._permits.find_by_job(event.job) is None:
                self._unprofiled.request(event.job, event.phase, event.now_s)
            return []
        state = self._places.current(event.job, event.epoch)
        if state is None or event.phase is not state.next_phase:
            return []
        if (
            event.iteration != state.iterations_done
            or self._permits.find_by_job(event.job) is not None
        ):
            return []
        if state.iterations_left == 0:  # it makes more than it declared
            state.spec = replace(state.spec, iterations=state.spec.iterations + 1)
        if self._groups.is_waiting(state) or self._groups.is_pending(state):
            return []
        assert state.placement is not None
        if state.joined:
            state.observed_s += event.now_s - state.free_s  # its sync and its own time delay nobody
            self._groups.request(state, event.phase, event.now_s)
        else:
            self._groups.join(state, event.now_s)
        return self._groups.grant(state.placement.group, event.now_s)

    def _on_finished_phase(self, event: PhaseFinished) -> list[Command]:
        permit = self._permits.find(event.permit)
        if permit is None or permit.job != event.job:
            return []
        if event.job in self._unprofiled:
            self._permits.release(permit)
            held_s = event.now_s - permit.started_s
            self._unprofiled.record_phase(event.job, permit, event.step_s or held_s)
            if not event.cut:
                self._unprofiled.advance_phase(event.job, permit.phase)
            return self._places.grant(permit.nodes, event.now_s)
        state = self._places.placed[event.job]
        self._permits.release(permit)
        if event.work_s > 0:  # not a skipped phase
            state.observe(permit.phase, event.work_s)
        state.free_s = event.now_s
        if permit.phase is Phase.ROLLOUT:
            state.next_phase = Phase.TRAIN
            return self._places.grant(permit.nodes, event.now_s)
        state.end_iteration(event.now_s)
        commands = self._check_slo(state, event.now_s)
        return commands + self._places.grant(permit.nodes, event.now_s)

    def _on_rests(self, event: JobRests) -> list[Command]:
        state = self._places.current(event.job, event.epoch)
        if state is None or not state.joined or self._permits.find_by_job(event.job) is not None:
            return []
        if self._groups.is_waiting(state):
            return []
        assert state.placement is not None
        self._groups.rest(state)
        return self._groups.grant(state.placement.group, event.now_s)

    def _on_yields(self, event: JobYields) -> list[Command]:
        state = self._places.current(event.job, event.epoch)
        if (
            state is None
            or not self.has_held_jobs
            or self._permits.find_by_job(event.job) is not None
        ):
            return []
        if self._groups.is_waiting(state) or self._groups.is_pending(state):
            return []
        idle_s = event.now_s - state.free_s
        state.status, state.is_resting = JobStatus.SUSPENDED, False
        state.reason = (
            f"it asked for nothing for {idle_s:.0f} s while others waited for a place; it gets one "
            "again after its next request"
        )
        return [HoldJob(event.job, state.reason), *self._admission.depart([state], event.now_s)]

    def _on_tail(self, event: TailReached) -> list[Command]:
        permit = self._permits.find(event.permit)
        if permit is None or permit.job != event.job or not self._config.shrink_tails:
            return []
        has_waiters = self._groups.has_request_for(permit.nodes, event.job, (Phase.ROLLOUT,))
        if not (has_waiters and self._permits.can_shrink(permit)):
            return []
        self._permits.shrink(permit)
        shrink = ShrinkRollout(permit.number, permit.job)
        return [shrink, *self._places.grant(permit.nodes, event.now_s)]

    # ---- SLOs ----

    def _check_slo(self, state: JobState, now_s: float) -> list[Command]:
        """Check drift and the SLO of a job, once per iteration."""
        if state.iterations_left == 0:
            return []
        config = self._config
        profile = state.profile_after_drift(
            config.drift_tolerance, config.drift_headroom, both_ways=config.slo_basis == "realised"
        )
        commands: list[Command] = []
        if profile is not None:
            state.drift_profile = profile
            self._groups.record_profile_change(state)
            self._admission.observe(now_s, state)
            commands = self._places.apply(
                self._policy.revise(state.spec.job, profile, now_s), now_s
            )
        if self._guard.must_isolate(state, now_s):
            commands += self._isolate(state, now_s)
        if state.placement is not None:
            member = self._guard.find_overrunning_member(state, now_s)
            if member is not None:
                commands += self._displace(member, state, now_s)
        return commands

    def _isolate(self, state: JobState, now_s: float) -> list[Command]:
        self._admission.observe(now_s, state)
        return self._places.apply(self._policy.isolate(state.spec.job, now_s), now_s)

    def _isolate_misfits(self, now_s: float) -> list[Command]:
        """Give nodes of their own to jobs that cannot join without breaking a bounded iteration.
        While none are free they keep waiting for a better moment.
        """
        misfits = list(self._groups.misfits.values())
        self._groups.misfits.clear()
        waiting = [s for s in misfits if s.placement is not None and self._groups.is_pending(s)]
        return [command for state in waiting for command in self._isolate(state, now_s)]

    def _displace(self, member: JobState, affected: JobState, now_s: float) -> list[Command]:
        """Stop a member that overruns its declared profile, and hold it until a place fits it as it
        is.
        """
        job = member.spec.job
        reason = (
            f"its phases take {member.overrun:.1f} times what was declared, and "
            f"{affected.spec.job} could not keep its bound beside them"
        )
        stop = StopJob(job, member.epoch, moves=True, reason=reason)
        member.spec = replace(member.spec, profile=member.profile)
        member.drift_profile = None
        member.status = JobStatus.HELD
        member.displaced_reason = member.reason = reason
        departure = self._admission.depart([member], now_s)
        return [stop, *departure, HoldJob(job, reason), *self._admission.hold(member, now_s)]

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self._policy.check_integrity()
        if self._admission.has_pending_placements():
            return
        self._permits.check_integrity()
        self._groups.check_integrity()
        self._places.check_integrity()
        self._unprofiled.check_integrity()
        for permit in self._permits.active():
            known = permit.job in self._places.placed or permit.job in self._unprofiled
            assert known, f"{permit.job} holds a permit but is not placed"
        for job, state in self._jobs.items():
            assert (state.status is JobStatus.PLACED) == (job in self._places.placed)
            assert (state.status is JobStatus.HELD) == (job in self._admission.held)
            assert 0 <= state.iterations_done <= state.spec.iterations
            if state.status in (JobStatus.HELD, JobStatus.REFUSED):
                assert state.reason, f"{job} has no reason why it does not run"
