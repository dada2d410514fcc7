"""The phase cycle of the managed jobs: requests their permits, starts their phases and ends them.

A permit opens the gate of the job's turns or of its operations on the permit's nodes. The gate
closes when the phase ends, is preempted or loses its permit. Both gates of a job without a permit
are closed.
"""

from collections import deque
from collections.abc import Mapping
from typing import TypeAlias

from slackwater.control.coschedule.commands import (
    Command,
    GrantPermit,
    PermitEnded,
    PermitGiven,
    PermitShrunk,
    PhaseCommand,
)
from slackwater.control.coschedule.events import (
    Event,
    JobArrived,
    JobCrashReported,
    JobRests,
    JobYields,
    PhaseFinished,
    PhaseRequested,
    TailReached,
)
from slackwater.control.coschedule.job_state import JobStatus
from slackwater.control.coschedule.managed_job import TAIL_SHARE, HeldPermit, ManagedJob
from slackwater.control.coschedule.phase_events import PermitAsked, PermitProgress
from slackwater.control.coschedule.phase_gates import InstancesOn, PhaseGates
from slackwater.control.coschedule.phase_watch import IdleAction, PhaseLimits, PhaseWatch
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.control.jobs.events import (
    IterationDone,
    JobAnswered,
    JobCrashed,
    JobEnded,
    JobProfiled,
)
from slackwater.control.operations.events import OpsGated
from slackwater.control.operations.facts import OpEnded
from slackwater.control.rollout.events import JobGated
from slackwater.control.timer import SetTimer
from slackwater.model.ids import InstanceId, JobId
from slackwater.model.job import JobProfile
from slackwater.model.operation import OpKind
from slackwater.model.placement import Phase

COSCHEDULE = "coschedule:"
REST = f"{COSCHEDULE}rest "  # of the names of its timers; a job follows

# Phases are never measured as 0 s long: that means that the phase was skipped.
_LEAST_WORK_S = 1e-9

PhaseMessage: TypeAlias = (
    Command
    | PhaseCommand
    | JobGated
    | JobAnswered
    | JobProfiled
    | IterationDone
    | JobCrashed
    | JobEnded
)


class PhaseCycle:
    """The phase controller sets `now_s`, sends `messages`, and executes `commands`.

    Commands of the co-scheduler wait in that queue because executing one may notify the
    co-scheduler again, whose next commands must follow those that it gave before.
    """

    def __init__(
        self,
        jobs: Mapping[JobId, ManagedJob],
        scheduler: CoScheduler,
        instances_on: InstancesOn,
        limits: PhaseLimits,
    ) -> None:
        self._jobs = jobs
        self._scheduler = scheduler
        self._limits = limits
        self._watch = PhaseWatch(scheduler, limits)
        self._gates = PhaseGates(jobs, scheduler.permits, instances_on)
        self.commands: deque[Command] = deque()
        self.messages: list[PhaseMessage] = []
        self.now_s = 0.0

    def notify_scheduler(self, event: Event) -> None:
        self.commands.extend(self._scheduler.handle(event))

    def advance(self, job: ManagedJob) -> None:
        """The job did something: end its phase if that is over, and request the next one."""
        if job.evicted and job.next_phase(Phase.ROLLOUT) is not None:
            self.readmit(job)
            return
        if job.must_drain():
            job.drain()
            self.update_turn_gate(job)
        if job.is_phase_over():
            self.finish_phase(job)
            return
        if job.is_permit_unused:
            self.set_rest_timer(job)
        self._request_phase(job)

    def _request_phase(self, job: ManagedJob) -> None:
        expected = self._scheduler.next_phase(job.id)
        if job.permit is not None or job.requested_s is not None or expected is None:
            return
        wanted = job.next_phase(expected)
        if job.epoch is None or wanted is None:
            return
        skips_rollout = expected is Phase.ROLLOUT and self._scheduler.is_unprofiled(job.id)
        if wanted is not expected and (job.preempted_s or skips_rollout):
            # The phase was over where it was preempted, or would wait for nodes that it cannot use.
            job.end_preempted_phase(expected)
            self._scheduler.skip_phase(job.id)
            expected = wanted
        if expected is Phase.ROLLOUT and job.train_ended_s is not None:
            job.observed_s.setdefault(Phase.SYNC, []).append(self.now_s - job.train_ended_s)
            job.train_ended_s = None
        job.requested_s = self.now_s
        iteration = self._iteration(job)
        self.notify_scheduler(PhaseRequested(self.now_s, job.id, job.epoch, expected, iteration))

    def _iteration(self, job: ManagedJob) -> int:
        state = self._scheduler.find(job.id)
        if state is None or self._scheduler.is_unprofiled(job.id):
            return job.iteration
        return state.iterations_done

    # ---- what jobs do ----
    def open_turn(self, job: ManagedJob, sequence: int) -> None:
        job.open_turn(sequence)
        self.advance(job)

    def close_turn(self, job: ManagedJob, sequence: int) -> None:
        job.close_turn(sequence, self.now_s)
        if self.preempt_if_due(job, at_boundary=True):
            return
        if not job.requests_permits and job.permit is not None and job.reaches_tail():
            self.notify_scheduler(TailReached(self.now_s, job.id, job.permit.number))
        self.advance(job)

    def close_op(self, job: ManagedJob, event: OpEnded) -> None:
        job.close_op(event.request, self.now_s)
        if event.kind is OpKind.OPTIM_STEP and event.done:
            job.stepped, job.published = True, False
            job.trains_only |= self._watch.is_overlong(job, Phase.TRAIN, self.now_s)
            job.continues_training = self._watch.may_continue_training(job)
            if job.permit is not None:
                job.permit.record_step(self.now_s)
            if self.preempt_if_due(job, at_boundary=True):
                return
        elif event.kind is OpKind.PUBLISH and event.done:
            job.published = True
        self.advance(job)

    def record_progress(self, job: ManagedJob, event: PermitProgress) -> None:
        permit = job.permit
        if permit is None or permit.client_number != event.permit:
            return
        permit.active_s = event.now_s
        permit.turns, permit.done_turns = event.total, event.finished
        in_tail = 0 < TAIL_SHARE * event.total <= event.finished < event.total
        if in_tail and not permit.tail_reported:
            permit.tail_reported = True
            self.notify_scheduler(TailReached(event.now_s, event.job, permit.number))

    # ---- a phase starts ----
    def start_phase(self, command: GrantPermit) -> None:
        """The co-scheduler granted a permit."""
        job, now_s, phase = self._jobs[command.job], self.now_s, command.phase
        if self._scheduler.permits.find(command.permit) is None:
            return  # taken back by what followed from the same event
        request = job.permit_request
        wanted = job.next_phase(phase) if job.requested_s is not None else phase
        permit = HeldPermit(
            number=command.permit,
            client_number=_client_number(command, request),
            phase=phase,
            nodes=command.nodes,
            started_s=now_s,
            active_s=now_s,
            switch=command.switch,
        )
        if job.requests_permits and job.heartbeat_s is not None:
            permit.active_s = job.heartbeat_s  # its program may have died while it waited
        asked = job.requested_s is not None and request is not None
        job.start_phase(permit)
        if wanted is not phase:  # it has nothing to do in this phase
            job.permit_request = request
            self._end_phase(job, 0.0)
            return
        iteration = job.iteration if request is None else request.iteration
        self.messages.append(
            PermitGiven(
                job=job.id,
                permit=permit.client_number,
                phase=phase,
                iteration=iteration,
                nodes=permit.nodes,
                switch=permit.switch,
                asked=asked,
            )
        )
        if phase is Phase.ROLLOUT:
            self.update_turn_gate(job)
        else:
            self.messages.append(OpsGated(now_s, job.id, permit.nodes))
        self.advance(job)

    def shrink_rollout(self, job: ManagedJob, number: int) -> None:
        """Finish the rollout's last turns on a share of its instances."""
        permit = job.permit
        if permit is None or permit.number != number:
            return
        permit.tail_instances = self._gates.tail_instances(job, permit, self._limits.kept_share)
        self.update_turn_gate(job)
        self.messages.append(PermitShrunk(job.id, permit.client_number))

    def reopen_tails(self, instance: InstanceId) -> None:
        """An instance failed or leaves: let the tails on it finish anywhere on their nodes."""
        for job in self._jobs.values():
            permit = job.permit
            if permit is not None and instance in (permit.tail_instances or ()):
                permit.tail_instances = None
                self.update_turn_gate(job)

    def update_turn_gate(self, job: ManagedJob) -> None:
        self.messages.append(self._gates.turn_gate(job, self.now_s))

    def close_gates(self, job: ManagedJob) -> None:
        """Close both gates of a job without a permit."""
        self.update_turn_gate(job)
        self.messages.append(OpsGated(self.now_s, job.id, ()))

    # ---- a phase ends ----
    def finish_phase(self, job: ManagedJob) -> None:
        """The phase is over now."""
        assert job.permit is not None
        self._end_phase(job, max(self.now_s - job.permit.started_s, _LEAST_WORK_S))

    def finish_unused_phase(self, job: ManagedJob) -> None:
        """The phase was over when the last of its turns or operations ended."""
        assert job.permit is not None
        self._end_phase(job, max(job.permit.active_s - job.permit.started_s, 0.0))

    def return_permit(self, job: ManagedJob, client_number: int, work_s: float) -> None:
        """The job's own code says that the phase is over, and how long its work took."""
        if job.permit is not None and job.permit.client_number == client_number:
            self._end_phase(job, max(work_s, _LEAST_WORK_S))

    def _end_phase(self, job: ManagedJob, work_s: float) -> None:
        """End the phase by itself; `work_s` 0: it was skipped."""
        permit = job.permit
        assert permit is not None
        step_s = permit.longest_step_s
        self.end_phase(PhaseFinished(self.now_s, job.id, permit.number, work_s, step_s=step_s))

    def end_phase(self, event: PhaseFinished) -> None:
        """Close the permit that the event names, then see what the job does next."""
        job = self._jobs.get(event.job)
        if job is None or job.permit is None or job.permit.number != event.permit:
            self.notify_scheduler(event)
            return
        permit = job.end_phase(self.now_s, event.work_s)
        self._close_permit(job, permit, "")
        trained = permit.phase is Phase.TRAIN
        if trained:
            job.iteration += 1
            self.messages.append(IterationDone(self.now_s, job.id))
        self.notify_scheduler(event)
        self._release_tail(permit)
        profile = self._profile(job) if trained else None
        if profile is not None:
            self.messages.append(JobProfiled(self.now_s, job.id, profile))
        elif trained and job.requests_permits and job.iteration >= job.terms.iterations:
            ended = JobEnded(self.now_s, job.id, "finished", "made its iterations")
            self.messages.append(ended)
        else:
            self.advance(job)
            if job.is_idle:
                job.idle_since_s = self.now_s
                self.set_rest_timer(job)

    def preempt_if_due(self, job: ManagedJob, *, at_boundary: bool) -> bool:
        """End the phase of an unprofiled job if a member of a group waits for its nodes."""
        if job.requests_permits or job.permit is None or job.is_phase_over():
            return False
        if not self._scheduler.must_yield(job.id, at_boundary=at_boundary):
            return False
        if job.permit.phase is Phase.TRAIN and not job.ops:
            self.finish_phase(job)  # nothing is left that would resume
            return True
        permit = job.preempt(self.now_s)
        self._close_permit(job, permit, "")
        step_s = permit.longest_step_s
        self.notify_scheduler(
            PhaseFinished(self.now_s, job.id, permit.number, 0.0, cut=True, step_s=step_s)
        )
        self.advance(job)
        return True

    def revoke_permit(self, job: ManagedJob, reason: str) -> None:
        """Close the permit of a job, if it has one; `reason` is empty if the job gave it back."""
        job.requested_s, job.preempted_s = None, 0.0
        if job.permit is not None:
            permit = job.end_phase(self.now_s, 0.0)
            self._close_permit(job, permit, reason)
            self._release_tail(permit)

    def _close_permit(self, job: ManagedJob, permit: HeldPermit, reason: str) -> None:
        if permit.phase is Phase.ROLLOUT:
            self.update_turn_gate(job)
        else:
            self.messages.append(OpsGated(self.now_s, job.id, ()))
        self.messages.append(PermitEnded(job.id, permit.client_number, reason))

    def _release_tail(self, permit: HeldPermit) -> None:
        if permit.tail_instances:
            self.messages += self._gates.rollout_gates_on(permit.nodes, self.now_s)

    # ---- jobs that fail or do nothing ----
    def check_progress(self) -> None:
        """Crash jobs that broke a limit; end rollouts that are overlong while others wait."""
        for job in list(self._jobs.values()):
            if job.permit is None:
                continue
            reason = self._watch.violation(job, self.now_s)
            if reason is not None:
                self._crash(job, reason)
            elif self._watch.must_yield_rollout(job, self.now_s):
                # Its turns resume with the next permit.
                self._end_phase(job, self.now_s - job.permit.started_s)

    def _crash(self, job: ManagedJob, reason: str) -> None:
        """Its nodes go to others, and it arrives again, unless it has too many strikes."""
        job.strikes += 1
        self.revoke_permit(job, reason)
        epoch, job.epoch = job.epoch or 0, None
        self.notify_scheduler(JobCrashReported(self.now_s, job.id, epoch))
        if job.strikes >= self._limits.strikes:
            self.messages.append(JobEnded(self.now_s, job.id, "failed", reason))
        else:
            self.messages.append(JobCrashed(self.now_s, job.id, reason))

    def set_rest_timer(self, job: ManagedJob) -> None:
        """Check the job again after `rest_s`, unless its timer is set already."""
        if job.rest_timer_s is None or job.rest_timer_s <= self.now_s:
            job.rest_timer_s = self.now_s + self._limits.rest_s
            self.messages.append(SetTimer(f"{REST}{job.id}", job.rest_timer_s))

    def check_idle(self, job_id: JobId) -> None:
        """The rest timer of the job fired."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        job.rest_timer_s = None
        match self._watch.idle_action(job, self.now_s):
            case IdleAction.CHECK_LATER:
                self.set_rest_timer(job)
            case IdleAction.END_PHASE:
                self.finish_unused_phase(job)
            case IdleAction.REST:
                self.notify_scheduler(JobRests(self.now_s, job.id, job.epoch or 0))
                if self._scheduler.has_held_jobs:
                    self.set_rest_timer(job)
            case IdleAction.EVICT:
                self._evict(job)
            case None:
                pass

    def _evict(self, job: ManagedJob) -> None:
        """Another job may have its place until it has something to do again."""
        self.notify_scheduler(JobYields(self.now_s, job.id, job.epoch or 0))
        state = self._scheduler.find(job.id)
        if state is not None and state.status is JobStatus.SUSPENDED:
            job.epoch, job.evicted = None, True

    def readmit(self, job: ManagedJob) -> None:
        """An evicted job has something to do again: it arrives like any other."""
        state = self._scheduler.find(job.id)
        job.evicted = False
        if state is not None and state.status is JobStatus.SUSPENDED:
            done, crashes = state.iterations_done, state.crashes
            self.notify_scheduler(JobArrived(self.now_s, state.spec, done, crashes))

    # ---- measures ----
    def _profile(self, job: ManagedJob) -> JobProfile | None:
        """The profile of an unprofiled job, from its longest warm cycle; None while too few cycles
        were observed, or when it has no iteration left.
        """
        trains = job.observed_s.get(Phase.TRAIN, [])
        if not self._scheduler.is_unprofiled(job.id) or len(trains) < self._limits.cycles:
            return None
        if job.iteration >= job.terms.iterations:
            return None
        first = 1 if self._limits.cycles > 1 else 0  # the first cycle starts everything: not warm
        job.trains_only = Phase.ROLLOUT not in job.observed_s  # then each step is an iteration
        rollouts = job.observed_s.get(Phase.ROLLOUT, trains)
        syncs = job.observed_s.get(Phase.SYNC, [0.0])
        return job.terms.profile(max(rollouts[first:] or rollouts), max(trains[first:]), min(syncs))

    def slowdown(self, job: ManagedJob, now_s: float) -> float | None:
        """Its time on its SLO clock so far, over what its phases and its own time between them took
        of that; None before the clock runs.
        """
        state = self._scheduler.find(job.id)
        if state is None:
            return None
        alone_s = state.observed_s
        if job.permit is not None:
            alone_s += now_s - job.permit.started_s
        elif job.is_idle and state.joined:
            alone_s += now_s - state.free_s
        return max(state.clock_time_s(now_s) / alone_s, 1.0) if alone_s > 0 else None


def _client_number(command: GrantPermit, request: PermitAsked | None) -> int:
    """The number of the permit for the job's own code: one that held a permit before the control
    plane restarted keeps its number.
    """
    if request is None or request.phase is not command.phase or request.known_as is None:
        return command.permit
    return request.known_as
