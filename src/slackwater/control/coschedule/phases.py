"""The phase keeper: the co-scheduler as one component of the fleet controller, and the gates that
its permits open and close.

It hears of turns and operations, or of the permits that a job's own code asks for, and tells the
co-scheduler of phases; what the co-scheduler grants opens the gate of the job's turns or operations
on the permit's nodes, and closes when the phase is over. A job without terms takes no part, and has
no gate. A holder that is not heard of for `lease_s`, or a phase beyond its limit, loses the permit:
the job is a crash, and a new arrival. A client that does nothing with its permit, or samples on
without end, lets others in when they wait.
"""

from typing import ClassVar, Literal, TypeAlias, assert_never

from slackwater.control.coschedule import commands as do
from slackwater.control.coschedule import events as on
from slackwater.control.coschedule import phase_events as of_phase
from slackwater.control.coschedule.job_phases import JobPhases
from slackwater.control.coschedule.job_state import JobState, JobStatus
from slackwater.control.coschedule.phase_cycle import COSCHEDULE, REST, EnginesOn, PhaseCycle, Said
from slackwater.control.coschedule.phase_limits import PhaseLimits
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.control.coschedule.unmanaged_work import OpenWork, UnmanagedWork
from slackwater.control.jobs import events as of_job
from slackwater.control.jobs.commands import PlaceJob, ProfileJob
from slackwater.control.operations.events import ModelAdopted, OpsGated, OpSubmitted
from slackwater.control.operations.facts import OpOver, PublishDetached
from slackwater.control.rollout.commands import ReleaseInstance, ReportFault
from slackwater.control.rollout.events import InstanceLost, JobGated
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import InstanceId, JobId
from slackwater.model.job import JobSpec, JobTerms
from slackwater.model.operation import Operation, OpKind, OpStatus
from slackwater.model.placement import Phase

WATCH = f"{COSCHEDULE}watch"

Heard: TypeAlias = TurnOpened | TurnClosed | ReleaseInstance | ReportFault | PlaceJob | ProfileJob
Answer: TypeAlias = Literal["placed", "held", "refused"]


class PhaseKeeper:
    """See the module. `engines_on` names the instances of nodes, those with most of a job's turns
    first.
    """

    CONSUMES: ClassVar = {**on.EVENT_TYPES, **of_phase.EVENT_TYPES}
    CONSUMES |= {kind.__name__: kind for kind in (of_job.JobEnded, of_job.JobHeard, InstanceLost)}
    # What it hears as it is emitted, and what of that is for it alone.
    HEARS: ClassVar = Heard.__args__
    TAKES: ClassVar = (PlaceJob, ProfileJob)

    def __init__(
        self,
        scheduler: CoScheduler,
        engines_on: EnginesOn,
        limits: PhaseLimits | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits or PhaseLimits()
        self._jobs: dict[JobId, JobPhases] = {}
        self._apart = UnmanagedWork()
        self._cycle = PhaseCycle(self._jobs, scheduler, engines_on, self.limits)
        self._watching = False

    # ---- questions ----
    def find(self, job: JobId) -> JobPhases | None:
        """A job that takes part; the caller must not change it."""
        return self._jobs.get(job)

    def slowdown(self, job: JobId, now_s: float) -> float | None:
        """Of a job that takes part, so far; None before its clock runs."""
        one = self._jobs.get(job)
        return None if one is None else self._cycle.profiler.slowdown(one, now_s)

    def jobs(self) -> list[JobPhases]:
        return list(self._jobs.values())

    # ---- what happens ----
    def handle(
        self,
        event: on.Event | of_phase.PhaseEvent | of_job.JobEnded | of_job.JobHeard | InstanceLost,
    ) -> list[Said]:
        """What happened to phases, or to what they need."""
        self._cycle.now_s = event.now_s
        match event:
            case of_job.JobEnded(_, job):
                self._ended(job)
            case of_job.JobHeard(now_s, job):
                if (one := self._jobs.get(job)) is not None:
                    one.heard_s = now_s  # its program lives
            case InstanceLost(_, instance):
                self._instance_failed(instance)
            case OpSubmitted(_, operation):
                self._op_queued(operation)
            case ModelAdopted(records=records):
                for record in records:
                    if record.status is OpStatus.WAITING:
                        self._op_queued(record.operation)
            case _ if isinstance(event, of_phase.OfJob):
                one = self._jobs.get(event.job)
                if one is not None:
                    self._heard(one, event)
                else:
                    self._apart.heard(event)
            case _:
                self._of_schedule(event)
        return self._settled()

    def _of_schedule(self, event: on.Event | of_phase.PermitsNumbered) -> None:
        match event:
            case TimerFired(_, token) if token == WATCH:
                self._watch()
            case TimerFired(_, token) if token.startswith(REST):
                self._cycle.still(self._jobs.get(JobId(token.removeprefix(REST))))
            case on.PhaseFinished():
                self._cycle.told_finished(event)
            case on.JobCrashReported(_, job, epoch) | on.JobFinished(_, job, epoch):
                one = self._jobs.get(job)
                if one is not None and epoch == one.epoch:
                    self._cycle.lose(one, "its job is not placed any more")
                    one.epoch = None
                self._cycle.tell(event)
            case on.PhaseRequested(_, job, epoch):
                one = self._jobs.get(job)
                if one is not None and one.away:
                    self._cycle.come_back(one)
                elif one is not None and epoch == one.epoch:
                    one.requested_s = None  # asked for in so many words: it has something to do
                self._cycle.tell(event)
            case of_phase.PermitsNumbered(_, after):
                self.scheduler.permits.number_after(after)
            case _:
                self._cycle.tell(event)

    def hear(self, message: Heard, now_s: float) -> list[Said]:
        """What another component says, as it says it."""
        self._cycle.now_s = now_s
        match message:
            case TurnOpened():
                self._turn_opened(message)
            case TurnClosed():
                self._turn_closed(message)
            case ReleaseInstance(instance) | ReportFault(instance):
                self._instance_failed(instance)
            case PlaceJob():
                self._place(message)
            case ProfileJob():
                self._profile(message)
            case _:
                assert_never(message)
        return self._settled()

    def _place(self, command: PlaceJob) -> None:
        """A job wants a place; one without terms shares what the service has."""
        terms, profile, now_s = command.terms, command.profile, self._cycle.now_s
        if terms is None:
            self._answer(command.job, "placed", "shares what the service has")
            return
        one = self._one(command.job, terms)
        if profile is None:
            self._answer(command.job, "refused", "nothing is known of its phases")
            return
        self._fell(one)
        state = self.scheduler.find(command.job)
        one.away = _must_ask_again(one, state, command)
        if one.away:
            reason = "its program lost its place, and has one again when it asks for a permit"
            self._answer(command.job, "held", reason)
            return
        crashes = command.crashes if state is None else state.crashes
        spec = JobSpec(
            job=command.job,
            arrival_s=now_s,
            iterations=terms.iterations,
            slo=terms.bound,
            profile=profile,
            priority=terms.priority,
            slo_scope=terms.slo_scope,
        )
        one.iteration = command.iterations_done
        self._cycle.tell(on.JobArrived(now_s, spec, command.iterations_done, crashes))
        if state is not None and state.status is JobStatus.HELD:
            # It crashed while it waited, and waits on.
            self._answer(command.job, "held", state.reason)

    def _profile(self, command: ProfileJob) -> None:
        """A job's cycle is to be found out."""
        one, terms = self._one(command.job, command.terms), command.terms
        self._fell(one)
        one.seen.clear()
        nodes, devices = (
            (terms.rollout_nodes, terms.train_nodes),
            (terms.rollout_devices, terms.train_devices),
        )
        self._cycle.tell(on.ProfilingAsked(self._cycle.now_s, command.job, *nodes, *devices))
        if self.scheduler.is_guest(command.job):
            one.epoch = 0
            self._cycle.look(one)

    def _fell(self, one: JobPhases) -> None:
        """A job that comes again while it has a place crashed unseen: its driver did. A guest that
        is known now leaves.
        """
        if one.epoch is not None:
            self._cycle.lose(one, "its driver is gone")
            epoch, one.epoch = one.epoch, None
            self._cycle.tell(on.JobCrashReported(self._cycle.now_s, one.job, epoch))

    def _ended(self, job: JobId) -> None:
        """The job is over: another job may have its place."""
        one, now_s = self._leave(job), self._cycle.now_s
        if one is not None:
            self._cycle.lose(one, "its job is over" if one.asks else "")
            state = self.scheduler.find(job)
            epoch = one.epoch if one.epoch is not None else (state.epoch if state else 0)
            self._cycle.tell(on.JobFinished(now_s, job, epoch))
            self._cycle.out += [JobGated(now_s, job, None), OpsGated(now_s, job, None)]

    def _turn_opened(self, event: TurnOpened) -> None:
        one = self._jobs.get(event.job)
        if one is None:
            self._apart.turn_opened(event.job, event.sequence)
            return
        one.turn_opened(event.sequence)
        self._cycle.look(one)

    def _turn_closed(self, event: TurnClosed) -> None:
        one = self._jobs.get(event.job)
        if one is None:
            self._apart.turn_closed(event.job, event.sequence)
            return
        one.turn_closed(event.sequence, self._cycle.now_s)
        if self._cycle.profiler.yields(one, at_boundary=True):
            self._cycle.cut_short(one)
            return
        if not one.asks and one.at_tail() and one.hold is not None:
            self._cycle.tell(on.TailReached(self._cycle.now_s, one.job, one.hold.permit))
        self._cycle.look(one)

    def _instance_failed(self, instance: InstanceId) -> None:
        """It is gone, let go or at fault: a tail kept there may end anywhere on its nodes."""
        for one in self._jobs.values():
            if one.hold is not None and one.hold.kept and instance in one.hold.kept:
                one.hold.kept = None
                self._cycle.gate_turns(one)

    # ---- what jobs say and do ----
    def _heard(self, one: JobPhases, event: of_phase.OfJob) -> None:
        match event:
            case of_phase.PermitAsked():
                one.asks = True
                if one.hold is None:
                    one.ask = event
                    self._cycle.look(one)
            case of_phase.PermitProgress():
                self._progress(one, event)
            case of_phase.PermitReturned(_, _, permit, work_s):
                if one.hold is not None and one.hold.known_as == permit:
                    self._cycle.finish(one, max(work_s, 1e-9))
            case PublishDetached():
                one.published = True
                self._cycle.look(one)
            case OpOver():
                self._op_over(one, event)
            case _:
                assert_never(event)

    def _op_queued(self, operation: Operation) -> None:
        one, kind = self._jobs.get(operation.job), operation.kind
        if one is None:
            self._apart.op_queued(operation)
        elif kind.needs_permit:
            one.ops.add(operation.request)
            self._cycle.look(one)
        elif one.begins_anew(kind):
            self._cycle.end_quiet(one)

    def _progress(self, one: JobPhases, event: of_phase.PermitProgress) -> None:
        hold = one.hold
        if hold is None or hold.known_as != event.permit:
            return
        hold.heard_s = event.now_s
        hold.turns, hold.done_turns = event.total, event.finished
        tail = 0 < 0.8 * event.total <= event.finished < event.total
        if tail and not hold.tail_said:
            hold.tail_said = True
            self._cycle.tell(on.TailReached(event.now_s, event.job, hold.permit))

    def _op_over(self, one: JobPhases, event: OpOver) -> None:
        one.op_over(event.request, self._cycle.now_s)
        if event.kind is OpKind.OPTIM_STEP and event.done:
            one.stepped, one.published = True, False
            one.trains_only = one.trains_only or self._cycle.watcher.goes_on(
                one, Phase.TRAIN, self._cycle.now_s
            )
            one.trains_on = self._cycle.watcher.trains_on(one)
            if one.hold is not None:
                one.hold.step(self._cycle.now_s)
            if self._cycle.profiler.yields(one, at_boundary=True):
                self._cycle.cut_short(one)
                return
        elif event.kind is OpKind.PUBLISH and event.done:
            one.published = True
        self._cycle.look(one)

    def _let_members_in(self) -> bool:
        """Cut rollouts of unprofiled jobs where a member waits: their turns keep their tokens."""
        for one in self._jobs.values():
            rolls = one.hold is not None and one.hold.phase is Phase.ROLLOUT
            if rolls and self._cycle.profiler.yields(one, at_boundary=False):
                self._cycle.cut_short(one)
                return True
        return False

    # ---- the watch ----
    def _watch(self) -> None:
        self._watching = False
        for one in list(self._jobs.values()):
            hold = one.hold
            if hold is None:
                continue
            why = self._cycle.watcher.why_lost(one, self._cycle.now_s)
            if why is not None:
                self._cycle.crash(one, why)
            elif self._cycle.watcher.rolls_on(one, self._cycle.now_s):
                self._cycle.finish(
                    one, self._cycle.now_s - hold.since_s
                )  # its turns go on with the next one

    # ---- what the co-scheduler says ----
    def _settled(self) -> list[Said]:
        while self._cycle.queue or self._let_members_in():
            while self._cycle.queue:
                self._carry(self._cycle.queue.popleft())
        if not self._watching and any(one.hold is not None for one in self._jobs.values()):
            self._watching = True
            every_s = min(self.limits.lease_s / 4, self.limits.least_s / 4)
            self._cycle.out.append(SetTimer(WATCH, self._cycle.now_s + every_s))
        out, self._cycle.out = self._cycle.out, []
        return out

    def _carry(self, command: do.Command) -> None:
        out = self._cycle.out
        match command:
            case do.StartJob(job, epoch):
                self._answer(job, "placed", command.reason)
                one = self._jobs[job]
                one.epoch, one.idle_since_s = epoch, self._cycle.now_s
                out.append(command)
                out += self._cycle.gates.of_both(one, self._cycle.now_s)
                self._cycle.look(one)
            case do.StopJob(job, epoch, _, reason):
                one = self._jobs[job]
                if one.epoch == epoch:
                    self._cycle.lose(one, reason)
                    one.epoch = None
                out.append(command)
            case do.HoldJob(job, reason):
                self._answer(job, "held", reason)
                out += self._cycle.gates.of_both(self._jobs[job], self._cycle.now_s)
                out.append(command)
                for other in self._jobs.values():
                    if other.is_idle and other.epoch:
                        self._cycle.await_rest(other)
            case do.RefuseJob(job, reason):
                self._answer(job, "refused", reason)
                self._leave(job)
                out.append(command)
            case do.GrantPermit():
                self._cycle.granted(command)
            case do.ShrinkRollout(permit, job):
                self._cycle.shrink(self._jobs[job], permit)
            case do.RentNodes() | do.ReturnNodes() | SetTimer():
                out.append(command)
            case _:
                assert_never(command)

    # ---- gates ----
    def _one(self, job: JobId, terms: JobTerms) -> JobPhases:
        one = self._jobs.get(job)
        if one is None:
            one = self._jobs[job] = JobPhases(job, terms)
            work = self._apart.taken(job)
            one.turns, one.ops = work.turns, work.ops
            self._cycle.out += self._cycle.gates.of_both(one, self._cycle.now_s)
        one.terms = terms
        return one

    def _leave(self, job: JobId) -> JobPhases | None:
        """It takes no part any more, whatever it has open."""
        one = self._jobs.pop(job, None)
        if one is not None:
            self._apart.given(job, OpenWork(one.turns, one.ops))
        return one

    def _answer(self, job: JobId, answer: Answer, reason: str) -> None:
        self._cycle.out.append(of_job.JobAnswered(self._cycle.now_s, job, answer, reason))

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self.scheduler.check_integrity()
        held = {permit.number: permit.job for permit in self.scheduler.permits.held()}
        mine = {one.hold.permit: job for job, one in self._jobs.items() if one.hold is not None}
        assert held == mine, f"permits are out of step: {held} {mine}"
        for job, one in self._jobs.items():
            assert one.hold is None or one.requested_s is None, f"{job} holds and waits"
            state = self.scheduler.find(job)
            placed = state is not None and state.status is JobStatus.PLACED
            here = placed or self.scheduler.is_guest(job)
            assert here == (one.epoch is not None), f"{job}: placed {here}, epoch {one.epoch}"


def _must_ask_again(one: JobPhases, state: JobState | None, command: PlaceJob) -> bool:
    """Whether a job that crashed has no place until its program is heard of.

    Nobody knows whether that still runs, unless the service runs it: then it is started with a
    place.
    """
    crashed = state is not None and state.status is JobStatus.AWAY
    return crashed and one.asks and one.ask is None and not command.driven
