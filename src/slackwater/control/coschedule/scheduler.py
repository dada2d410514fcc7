"""The co-scheduler: admits jobs, gives permits for their phases, and keeps every admitted job
within its SLO.

One event in, commands out. Placement policies say which jobs share which nodes; orderings say whose
phase is next. Messages that come late or twice (an old epoch, a permit that is back already) change
nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from slackwater.policy.ordering.priority import WaitingPhase
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.interface import PlacementPolicy

_OVER = (JobStatus.FINISHED, JobStatus.REFUSED)


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
        self._guests = UnprofiledJobs(fleet, self._permits)
        self._guard = SloGuard(self._config, fleet, self._groups)
        self._jobs: dict[JobId, JobState] = {}
        self._places = PlacementTable(policy, self._jobs, self._groups, self._permits, self._guests)
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
        """Take one event, return what the body must do about it, in order."""
        kept = tuple(self._permits.kept)
        commands: list[Command] = []
        decides = isinstance(event, JobArrived | TimerFired)
        if self._admission.is_unsettled(event.now_s if decides else None):
            commands.extend(self._admission.settle(event.now_s))
        commands.extend(self._handlers[type(event)](event))
        if self._groups.misfits and not self._admission.is_unsettled():
            commands.extend(self._isolate_misfits(event.now_s))
        if kept or self._guests:
            commands.extend(self._serve_guests(kept, event.now_s))
        return commands

    def _serve_guests(self, kept: tuple[NodeId, ...], now_s: float) -> list[Command]:
        """Permits for unprofiled jobs, and for members on nodes that are kept for none any more."""
        bears = partial(self._bears_step, now_s)
        commands: list[Command] = []
        commands.extend(self._guests.grant(self._groups.is_wanted, bears, now_s))
        released = tuple(node for node in kept if node not in self._permits.kept)
        commands.extend(self._places.grant(released, now_s))
        self._guests.keep_nodes(partial(self._bears_guest, now_s))
        return commands

    def _bears_guest(self, now_s: float, node: NodeId, phase: Phase, since_s: float) -> bool:
        """Whether the members of a node keep their bounds if a guest that waits so long has its
        next phase first.
        """
        members = self._groups.members_on(node)
        return self._guard.bear_guest(members, phase, now_s - since_s, now_s)

    def _bears_step(self, now_s: float, node: NodeId, step_s: float | None) -> bool:
        """Whether the members of a node keep their bounds if it trains a guest for one step, of
        unknown length if None.
        """
        return self._guard.bear_step(self._groups.members_on(node), step_s, now_s)

    def job(self, job: JobId) -> JobState:
        """What is known of a job; the body must not change it."""
        return self._jobs[job]

    def find(self, job: JobId) -> JobState | None:
        """What is known of a job, if anything is; the body must not change it."""
        return self._jobs.get(job)

    def next_phase(self, job: JobId) -> Phase | None:
        """The phase that a placed job or a guest may ask for; None of any other."""
        if job in self._guests:
            return self._guests.next_phase(job)
        state = self._places.placed.get(job)
        return None if state is None else state.next_phase

    def is_guest(self, job: JobId) -> bool:
        """Whether it is being profiled."""
        return job in self._guests

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """All that jobs can be placed on."""
        return self._fleet.nodes

    @property
    def places(self) -> tuple[NodeId, ...]:
        """Where deployments are: nodes, or the smallest parts that jobs can have."""
        pools = (self._fleet.rollout, self._fleet.train)
        sizes = ((p.role, p.least_devices if p.least_devices > 1 else 0) for p in pools)
        return tuple(place for role, size in sizes for place in self._fleet.places(role, size))

    @property
    def permits(self) -> Permits:
        """To look at."""
        return self._permits

    @property
    def holds_jobs(self) -> bool:
        """Whether any job waits for a place."""
        return bool(self._admission.held)

    def is_waited_for(self, job: JobId, nodes: tuple[NodeId, ...]) -> bool:
        """Whether another job waits for one of the nodes that this one holds, or for its turn to
        come after this one's.
        """
        state = self._places.placed.get(job)
        if state is not None and self._groups.keeps_waiting(state):
            return True
        return self._groups.waits_for(nodes, job) or self._guests.wait_for(nodes, job)

    def is_rollout_held(self, job: JobId) -> bool:
        """Whether another job holds nodes of a placed job's rollouts."""
        state = self._places.placed.get(job)
        placement = None if state is None else state.placement
        return placement is not None and self._permits.others_hold(placement.rollout_nodes, job)

    def yields(self, job: JobId, *, at_boundary: bool) -> bool:
        """Whether it is being profiled on nodes that a member of a group waits for: nobody knows
        how long its phase would go on. Nodes that were kept for it are its own until the next
        boundary, where a step or a turn has ended.
        """
        if job not in self._guests or not (at_boundary or not self._guests.is_owed(job)):
            return False
        permit = self._permits.held_by(job)
        return permit is not None and self._groups.waits_for(permit.nodes, job)

    def skip_phase(self, job: JobId) -> None:
        """An unprofiled job has nothing to do in its next phase."""
        self._guests.finished(job, self._guests.next_phase(job))

    def waiting(self) -> list[WaitingPhase]:
        """Phases of placed jobs that wait for their turn."""
        return self._groups.waiting()

    def hourly_cost(self) -> float:
        """Of the nodes that are rented now."""
        return self._policy.hourly_cost()

    # Jobs that come and go.

    def _on_arrived(self, event: JobArrived) -> list[Command]:
        state = self._jobs.get(event.spec.job)
        spec = replace(event.spec, profile=self._fleet.counted(event.spec.profile))
        if state is None:
            state = self._jobs[event.spec.job] = JobState(spec, self._fleet.parts(spec.profile))
        elif state.status in _OVER and event.spec.arrival_s > state.spec.arrival_s:
            size = self._fleet.parts(spec.profile)
            state = self._jobs[event.spec.job] = JobState(spec, size, crashes=event.crashes)
        elif state.status is not JobStatus.AWAY or event.crashes != state.crashes:
            return []
        self._guests.leave(event.spec.job)
        state.iterations_done = event.iterations_done
        state.next_phase = Phase.ROLLOUT
        return self._admission.arrive(state, event.now_s)

    def _on_profiling(self, event: ProfilingAsked) -> list[Command]:
        if event.job in self._guests or event.job in self._places.placed:
            return []
        demand = self._fleet.counted(
            JobProfile(
                *(1.0, 1.0),  # its phases are yet to be seen
                rollout_nodes=event.rollout_nodes,
                train_nodes=event.train_nodes,
                rollout_devices=event.rollout_devices,
                train_devices=event.train_devices,
            )
        )
        why = self._guests.why_never(demand)
        if why is not None:
            return [RefuseJob(event.job, why)]
        self._guests.enter(event.job, demand)
        return []

    def _guest_leaves(self, job: JobId, now_s: float) -> list[Command]:
        permit = self._permits.held_by(job)
        self._guests.leave(job)
        if permit is None:
            return []
        self._permits.take_back(permit)
        return self._places.grant(permit.nodes, now_s)

    def _on_finished_job(self, event: JobFinished) -> list[Command]:
        if event.job in self._guests:
            return self._guest_told(event)
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

    def _guest_told(self, event: JobCrashReported | JobFinished) -> list[Command]:
        """A guest has no placement, and so no epoch; a message that names one came late."""
        return [] if event.epoch else self._guest_leaves(event.job, event.now_s)

    def _on_crashed(self, event: JobCrashReported) -> list[Command]:
        if event.job in self._guests:
            return self._guest_told(event)
        state = self._places.current(event.job, event.epoch)
        if state is None:
            return []
        self._strike(state)
        return self._admission.depart([state], event.now_s)

    def _on_node_lost(self, event: NodeLost) -> list[Command]:
        struck = [
            state
            for state in self._places.placed.values()
            if state.placement is not None and state.placement.uses(event.node)
        ]
        commands: list[Command] = []
        for state in struck:
            self._strike(state)
            commands.append(StopJob(state.spec.job, state.epoch, False, f"{event.node} is lost"))
        if struck:
            commands.extend(self._admission.depart(struck, event.now_s))
        return commands

    def _strike(self, state: JobState) -> None:
        """A crash: the broken iteration is done again, and is no one's delay."""
        state.status = JobStatus.AWAY
        state.crashes += 1
        state.spent_s, state.clock_s = state.iteration_began_s, None
        state.rests = False

    # Phases.

    def _on_requested(self, event: PhaseRequested) -> list[Command]:
        if event.job in self._guests:
            if self._permits.held_by(event.job) is None:
                self._guests.request(event.job, event.phase, event.now_s)
            return []
        state = self._places.current(event.job, event.epoch)
        if state is None or event.phase is not state.next_phase:
            return []
        if event.iteration != state.iterations_done or self._permits.held_by(event.job) is not None:
            return []
        if state.iterations_left == 0:  # it makes one more than it said
            state.spec = replace(state.spec, iterations=state.spec.iterations + 1)
        if self._groups.is_waiting(state) or self._groups.is_pending(state):
            return []
        assert state.placement is not None
        if state.joined:
            state.seen_s += event.now_s - state.free_s  # its sync, and its own time: nobody's delay
            self._groups.request(state, event.phase, event.now_s)
        else:
            self._groups.join(state, event.now_s)
        commands: list[Command] = []
        self._groups.grant(state.placement.group, event.now_s, commands)
        return commands

    def _on_finished_phase(self, event: PhaseFinished) -> list[Command]:
        permit = self._permits.find(event.permit)
        if permit is None or permit.job != event.job:
            return []
        if event.job in self._guests:
            self._permits.take_back(permit)
            held_s = event.now_s - permit.started_s
            self._guests.ran(event.job, permit, event.step_s or held_s)
            if not event.cut:
                self._guests.finished(event.job, permit.phase)
            return self._places.grant(permit.nodes, event.now_s)
        state = self._places.placed[event.job]
        self._permits.take_back(permit)
        if event.work_s > 0:  # one that was skipped tells nothing
            state.observe(permit.phase, event.work_s)
        state.free_s = event.now_s
        if permit.phase is Phase.ROLLOUT:
            state.next_phase = Phase.TRAIN
            return self._places.grant(permit.nodes, event.now_s)
        state.end_iteration(event.now_s)
        return self._after_iteration(state, event.now_s) + self._places.grant(
            permit.nodes, event.now_s
        )

    def _on_rests(self, event: JobRests) -> list[Command]:
        state = self._places.current(event.job, event.epoch)
        if state is None or not state.joined or self._permits.held_by(event.job) is not None:
            return []
        if self._groups.is_waiting(state):
            return []
        assert state.placement is not None
        self._groups.rest(state)
        commands: list[Command] = []
        self._groups.grant(state.placement.group, event.now_s, commands)
        return commands

    def _on_yields(self, event: JobYields) -> list[Command]:
        state = self._places.current(event.job, event.epoch)
        if state is None or not self.holds_jobs or self._permits.held_by(event.job) is not None:
            return []
        if self._groups.is_waiting(state) or self._groups.is_pending(state):
            return []
        still_s = event.now_s - state.free_s
        state.status, state.rests = JobStatus.AWAY, False
        state.reason = (
            f"it asked for nothing for {still_s:.0f} s, and others wait for a place; with its "
            "next request it does too"
        )
        return [HoldJob(event.job, state.reason), *self._admission.depart([state], event.now_s)]

    def _on_tail(self, event: TailReached) -> list[Command]:
        permit = self._permits.find(event.permit)
        if permit is None or permit.job != event.job or not self._config.shrink_tails:
            return []
        wanted = self._groups.waits_for(permit.nodes, event.job, (Phase.ROLLOUT,))
        if not (wanted and self._permits.can_shrink(permit)):
            return []
        self._permits.shrink(permit)
        shrink: list[Command] = [ShrinkRollout(permit.number, permit.job)]
        return shrink + self._places.grant(permit.nodes, event.now_s)

    # Keeping the SLO.

    def _after_iteration(self, state: JobState, now_s: float) -> list[Command]:
        """Drift and the SLO guard, once per iteration."""
        if state.iterations_left == 0:
            return []
        config = self._config
        profile = state.drifted(
            config.drift_tolerance, config.drift_headroom, both_ways=config.slo_basis == "realised"
        )
        commands: list[Command] = []
        if profile is not None:
            state.planned = profile
            self._groups.revised(state)
            self._admission.observe(now_s, state)
            commands = self._places.apply(
                self._policy.revise(state.spec.job, profile, now_s), now_s
            )
        if self._guard.must_leave(state, now_s):
            commands += self._isolate(state, now_s)
        intruder = self._guard.intruder(state, now_s) if state.placement is not None else None
        if intruder is not None:
            commands += self._displace(intruder, state, now_s)
        return commands

    def _isolate(self, state: JobState, now_s: float) -> list[Command]:
        self._admission.observe(now_s, state)
        return self._places.apply(self._policy.isolate(state.spec.job, now_s), now_s)

    def _isolate_misfits(self, now_s: float) -> list[Command]:
        """Give nodes of their own to jobs that cannot join without breaking a bounded iteration;
        as long as none are free they go on waiting for a better moment.
        """
        misfits = list(self._groups.misfits.values())
        self._groups.misfits.clear()
        waiting = [s for s in misfits if s.placement is not None and self._groups.is_pending(s)]
        return [command for state in waiting for command in self._isolate(state, now_s)]

    def _displace(self, intruder: JobState, sufferer: JobState, now_s: float) -> list[Command]:
        """A job that takes much longer than was declared of it makes room, and waits for a place
        that fits it as it is.
        """
        times = intruder.outgrown
        reason = (
            f"its phases take {times:.1f} times what was declared, and {sufferer.spec.job} could "
            "not keep its bound beside them"
        )
        stop = StopJob(intruder.spec.job, intruder.epoch, True, reason)
        intruder.spec = replace(intruder.spec, profile=intruder.profile)
        intruder.planned = None
        intruder.status = JobStatus.HELD
        intruder.displaced = intruder.reason = reason
        left = self._admission.depart([intruder], now_s)
        held = HoldJob(intruder.spec.job, reason)
        return [stop, *left, held, *self._admission.hold(intruder, now_s)]

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self._policy.check_integrity()
        if self._admission.is_unsettled():
            return
        self._permits.check_integrity()
        self._groups.check_integrity()
        self._places.check_integrity()
        self._guests.check_integrity()
        for permit in self._permits.held():
            at_home = permit.job in self._places.placed or permit.job in self._guests
            assert at_home, f"{permit.job} holds a permit but is not placed"
        for job, state in self._jobs.items():
            assert (state.status is JobStatus.PLACED) == (job in self._places.placed)
            assert (state.status is JobStatus.HELD) == (job in self._admission.held)
            assert 0 <= state.iterations_done <= state.spec.iterations
            if state.status in (JobStatus.HELD, JobStatus.REFUSED):
                assert state.reason, f"{job} was not told why it does not run"
