"""The phase controller: the co-scheduler as one component of the fleet controller.

It turns what jobs do (open turns, queue operations, request permits) into phases, asks the
co-scheduler for permits, and opens and closes the gates of turns and operations by the permits that
it gets. Jobs without terms are not managed and have no gates.

A job that breaks a limit (`PhaseLimits`) loses its permit: that counts as a crash, and it arrives
again. A client that leaves its permit unused, or samples without end, lets others in when they
wait.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias, assert_never

from slackwater.control.coschedule import events, phase_events
from slackwater.control.coschedule.commands import (
    Command,
    GrantPermit,
    HoldJob,
    RefuseJob,
    RentNodes,
    ReturnNodes,
    ShrinkRollout,
    StartJob,
    StopJob,
)
from slackwater.control.coschedule.events import (
    JobArrived,
    JobCrashReported,
    JobFinished,
    PhaseFinished,
    PhaseRequested,
    ProfilingAsked,
)
from slackwater.control.coschedule.job_state import JobState, JobStatus
from slackwater.control.coschedule.managed_job import ManagedJob
from slackwater.control.coschedule.phase_cycle import COSCHEDULE, REST, PhaseCycle, PhaseMessage
from slackwater.control.coschedule.phase_events import (
    JobPhaseEvent,
    PermitAsked,
    PermitProgress,
    PermitReturned,
    PermitsNumbered,
    PhaseEvent,
)
from slackwater.control.coschedule.phase_gates import InstancesOn
from slackwater.control.coschedule.phase_watch import PhaseLimits
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.control.jobs.commands import PlaceJob, ProfileJob
from slackwater.control.jobs.events import JobAnswered, JobEnded, JobHeard
from slackwater.control.operations.events import ModelAdopted, OpsGated, OpSubmitted
from slackwater.control.operations.facts import OpEnded, PublishDetached
from slackwater.control.rollout.commands import ReleaseInstance, ReportFault
from slackwater.control.rollout.events import InstanceLost, JobGated
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, RequestId
from slackwater.model.job import JobSpec, JobTerms
from slackwater.model.operation import Operation, OpStatus
from slackwater.model.placement import Phase

WATCH = f"{COSCHEDULE}watch"  # the timer that checks the limits of all phases

ComponentEvent: TypeAlias = JobEnded | JobHeard | InstanceLost
Observed: TypeAlias = (
    TurnOpened | TurnClosed | ReleaseInstance | ReportFault | PlaceJob | ProfileJob
)


class PhaseController:
    """See the module."""

    CONSUMES: ClassVar = {
        **events.EVENT_TYPES,
        **phase_events.EVENT_TYPES,
        **{kind.__name__: kind for kind in ComponentEvent.__args__},
    }
    # Messages of other components that it sees as they are emitted, and those of them that no other
    # component gets.
    OBSERVES: ClassVar = Observed.__args__
    CLAIMS: ClassVar = (PlaceJob, ProfileJob)

    def __init__(
        self,
        scheduler: CoScheduler,
        instances_on: InstancesOn,
        limits: PhaseLimits | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.limits = limits or PhaseLimits()
        self._jobs: dict[JobId, ManagedJob] = {}
        # Open work of jobs that are not managed (yet): after a restart of the control plane, turns
        # and operations are there before their job is placed.
        self._unmanaged: defaultdict[JobId, OpenWork] = defaultdict(OpenWork)
        self._cycle = PhaseCycle(self._jobs, scheduler, instances_on, self.limits)
        self._watching = False

    # ---- queries ----
    def find(self, job: JobId) -> ManagedJob | None:
        """The caller must not change it."""
        return self._jobs.get(job)

    def jobs(self) -> list[ManagedJob]:
        return list(self._jobs.values())

    def slowdown(self, job: JobId, now_s: float) -> float | None:
        """Of a managed job, so far; None before its clock runs."""
        managed = self._jobs.get(job)
        return None if managed is None else self._cycle.slowdown(managed, now_s)

    # ---- messages ----
    def handle(self, event: events.Event | PhaseEvent | ComponentEvent) -> list[PhaseMessage]:
        """Take an event that the fleet controller routes here."""
        self._cycle.now_s = event.now_s
        match event:
            case JobEnded(_, job_id):
                self._end_job(job_id)
            case JobHeard(now_s, job_id):
                if (job := self._jobs.get(job_id)) is not None:
                    job.heartbeat_s = now_s
            case InstanceLost(_, instance):
                self._cycle.reopen_tails(instance)
            case OpSubmitted(_, operation):
                self._queue_op(operation)
            case ModelAdopted(records=records):
                for record in records:
                    if record.status is OpStatus.WAITING:
                        self._queue_op(record.operation)
            case _ if isinstance(event, JobPhaseEvent):
                self._take_job_event(event)
            case PermitsNumbered(_, after):
                self.scheduler.permits.number_after(after)
            case _:
                self._take_scheduler_event(event)
        return self._flush()

    def observe(self, message: Observed, now_s: float) -> list[PhaseMessage]:
        """Take a message of another component at the moment when that emits it."""
        self._cycle.now_s = now_s
        match message:
            case TurnOpened():
                if (job := self._jobs.get(message.job)) is not None:
                    self._cycle.open_turn(job, message.sequence)
                else:
                    self._unmanaged[message.job].turns.add(message.sequence)
            case TurnClosed():
                if (job := self._jobs.get(message.job)) is not None:
                    self._cycle.close_turn(job, message.sequence)
                else:
                    self._unmanaged[message.job].turns.discard(message.sequence)
                    self._forget_if_idle(message.job)
            case ReleaseInstance(instance) | ReportFault(instance):
                self._cycle.reopen_tails(instance)
            case PlaceJob():
                self._place(message)
            case ProfileJob():
                self._profile(message)
            case _:
                assert_never(message)
        return self._flush()

    def _take_job_event(self, event: JobPhaseEvent) -> None:
        job = self._jobs.get(event.job)
        if job is None:
            if isinstance(event, OpEnded):
                self._unmanaged[event.job].ops.discard(event.request)
                self._forget_if_idle(event.job)
            return
        match event:
            case PermitAsked():
                job.requests_permits = True
                if job.permit is None:
                    job.permit_request = event
                    self._cycle.advance(job)
            case PermitProgress():
                self._cycle.record_progress(job, event)
            case PermitReturned(_, _, permit, work_s):
                self._cycle.return_permit(job, permit, work_s)
            case PublishDetached():
                job.published = True
                self._cycle.advance(job)
            case OpEnded():
                self._cycle.close_op(job, event)
            case _:
                assert_never(event)

    def _take_scheduler_event(self, event: events.Event) -> None:
        """Pass an event on to the co-scheduler, and keep the managed job in step with it."""
        match event:
            case TimerFired(_, name) if name == WATCH:
                self._watching = False
                self._cycle.check_progress()
                return
            case TimerFired(_, name) if name.startswith(REST):
                self._cycle.check_idle(JobId(name.removeprefix(REST)))
                return
            case PhaseFinished():
                self._cycle.end_phase(event)
                return
            case JobCrashReported(_, job_id, epoch) | JobFinished(_, job_id, epoch):
                job = self._jobs.get(job_id)
                if job is not None and epoch == job.epoch:
                    self._cycle.revoke_permit(job, "its job is not placed any more")
                    job.epoch = None
            case PhaseRequested(_, job_id, epoch):
                job = self._jobs.get(job_id)
                if job is not None and job.evicted:
                    self._cycle.readmit(job)
                elif job is not None and epoch == job.epoch:
                    job.requested_s = None  # requested outside, so it has something to do
        self._cycle.notify_scheduler(event)

    def _queue_op(self, operation: Operation) -> None:
        job, kind = self._jobs.get(operation.job), operation.kind
        if job is None:
            if kind.needs_permit:
                self._unmanaged[operation.job].ops.add(operation.request)
        elif kind.needs_permit:
            job.ops.add(operation.request)
            self._cycle.advance(job)
        elif job.begins_next_iteration(kind):
            self._cycle.finish_unused_phase(job)

    # ---- jobs that come and go ----
    def _place(self, command: PlaceJob) -> None:
        """Let the co-scheduler place a job; one without terms needs no place."""
        terms, profile, now_s = command.terms, command.profile, self._cycle.now_s
        if terms is None:
            self._answer(command.job, "placed", "shares what the service has")
            return
        job = self._manage(command.job, terms)
        if profile is None:
            self._answer(command.job, "refused", "its profile is missing; give one, or profile it")
            return
        self._report_unseen_crash(job)
        state = self.scheduler.find(command.job)
        job.evicted = _must_ask_again(job, state, command)
        if job.evicted:
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
        job.iteration = command.iterations_done
        self._cycle.notify_scheduler(JobArrived(now_s, spec, command.iterations_done, crashes))
        if state is not None and state.status is JobStatus.HELD:
            # It crashed while it waited. The co-scheduler ignores the arrival: it still waits.
            self._answer(command.job, "held", state.reason)

    def _profile(self, command: ProfileJob) -> None:
        """Let the job run as an unprofiled one until its cycle is measured."""
        terms = command.terms
        job = self._manage(command.job, terms)
        self._report_unseen_crash(job)
        job.observed_s.clear()
        self._cycle.notify_scheduler(
            ProfilingAsked(
                self._cycle.now_s,
                command.job,
                rollout_nodes=terms.rollout_nodes,
                train_nodes=terms.train_nodes,
                rollout_devices=terms.rollout_devices,
                train_devices=terms.train_devices,
            )
        )
        if self.scheduler.is_unprofiled(command.job):
            job.epoch = 0
            self._cycle.advance(job)

    def _report_unseen_crash(self, job: ManagedJob) -> None:
        """A job that arrives while it has a place lost its driver without a report. An unprofiled
        job whose profile is known now leaves in the same way.
        """
        if job.epoch is not None:
            self._cycle.revoke_permit(job, "its driver is gone")
            epoch, job.epoch = job.epoch, None
            self._cycle.notify_scheduler(JobCrashReported(self._cycle.now_s, job.id, epoch))

    def _end_job(self, job_id: JobId) -> None:
        """Free its place, and open its gates for what it may still do."""
        job, now_s = self._unmanage(job_id), self._cycle.now_s
        if job is None:
            return
        self._cycle.revoke_permit(job, "its job is over" if job.requests_permits else "")
        state = self.scheduler.find(job_id)
        epoch = job.epoch if job.epoch is not None else (state.epoch if state else 0)
        self._cycle.notify_scheduler(JobFinished(now_s, job_id, epoch))
        self._cycle.messages += [JobGated(now_s, job_id, None), OpsGated(now_s, job_id, None)]

    def _manage(self, job_id: JobId, terms: JobTerms) -> ManagedJob:
        job = self._jobs.get(job_id)
        if job is None:
            work = self._unmanaged.pop(job_id, OpenWork())
            job = ManagedJob(job_id, terms, turns=work.turns, ops=work.ops)
            self._jobs[job_id] = job
            self._cycle.close_gates(job)
        job.terms = terms
        return job

    def _unmanage(self, job_id: JobId) -> ManagedJob | None:
        job = self._jobs.pop(job_id, None)
        if job is not None:
            self._unmanaged[job_id] = OpenWork(job.turns, job.ops)
            self._forget_if_idle(job_id)
        return job

    def _forget_if_idle(self, job: JobId) -> None:
        """Drop the record of a job that is not managed and has no open work."""
        work = self._unmanaged[job]
        if not (work.turns or work.ops):
            del self._unmanaged[job]

    def _answer(
        self, job: JobId, answer: Literal["placed", "held", "refused"], reason: str
    ) -> None:
        self._cycle.messages.append(JobAnswered(self._cycle.now_s, job, answer, reason))

    # ---- commands of the co-scheduler ----
    def _flush(self) -> list[PhaseMessage]:
        """Execute the co-scheduler's commands until none is left; return what follows."""
        commands = self._cycle.commands
        while commands or self._preempt_rollout():
            while commands:
                self._execute(commands.popleft())
        if not self._watching and any(job.permit is not None for job in self._jobs.values()):
            self._watching = True
            every_s = min(self.limits.lease_s / 4, self.limits.least_s / 4)
            self._cycle.messages.append(SetTimer(WATCH, self._cycle.now_s + every_s))
        messages, self._cycle.messages = self._cycle.messages, []
        return messages

    def _preempt_rollout(self) -> bool:
        """Preempt one rollout of an unprofiled job where a member of a group waits. Rollouts can be
        preempted at any time: their turns keep their tokens.
        """
        return any(
            job.permit is not None
            and job.permit.phase is Phase.ROLLOUT
            and self._cycle.preempt_if_due(job, at_boundary=False)
            for job in self._jobs.values()
        )

    def _execute(self, command: Command) -> None:
        messages = self._cycle.messages
        match command:
            case StartJob(job_id, epoch):
                self._answer(job_id, "placed", command.reason)
                job = self._jobs[job_id]
                job.epoch, job.idle_since_s = epoch, self._cycle.now_s
                messages.append(command)
                self._cycle.close_gates(job)
                self._cycle.advance(job)
            case StopJob(job_id, epoch, _, reason):
                job = self._jobs[job_id]
                if job.epoch == epoch:
                    self._cycle.revoke_permit(job, reason)
                    job.epoch = None
                messages.append(command)
            case HoldJob(job_id, reason):
                self._answer(job_id, "held", reason)
                self._cycle.close_gates(self._jobs[job_id])
                messages.append(command)
                for other in self._jobs.values():
                    if other.is_idle and other.epoch:
                        self._cycle.set_rest_timer(other)
            case RefuseJob(job_id, reason):
                self._answer(job_id, "refused", reason)
                self._unmanage(job_id)
                messages.append(command)
            case GrantPermit():
                self._cycle.start_phase(command)
            case ShrinkRollout(permit, job_id):
                self._cycle.shrink_rollout(self._jobs[job_id], permit)
            case RentNodes() | ReturnNodes() | SetTimer():
                messages.append(command)
            case _:
                assert_never(command)

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self.scheduler.check_integrity()
        granted = {permit.number: permit.job for permit in self.scheduler.permits.active()}
        held = {job.permit.number: job.id for job in self._jobs.values() if job.permit is not None}
        assert granted == held, f"permits are out of step: granted {granted}, held {held}"
        for job_id, job in self._jobs.items():
            assert job.permit is None or job.requested_s is None, f"{job_id} holds and waits"
            state = self.scheduler.find(job_id)
            placed = state is not None and state.status is JobStatus.PLACED
            placed = placed or self.scheduler.is_unprofiled(job_id)
            assert placed == (job.epoch is not None), f"{job_id}: {placed=}, epoch {job.epoch}"


def _must_ask_again(job: ManagedJob, state: JobState | None, command: PlaceJob) -> bool:
    """Whether a job that crashed gets no place until its program requests a permit.

    Its program may be gone. That does not matter for a driver of the service, which starts when the
    job has a place.
    """
    crashed = state is not None and state.status is JobStatus.SUSPENDED
    return crashed and job.requests_permits and job.permit_request is None and not command.driven


@dataclass(slots=True)
class OpenWork:
    """Turns by sequence number, and operations that need a permit."""

    turns: set[int] = field(default_factory=set)
    ops: set[RequestId] = field(default_factory=set)
