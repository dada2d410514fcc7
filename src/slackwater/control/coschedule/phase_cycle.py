"""From phase to phase: what a job's next one is, what its permit opens, and what ends it.

What the co-scheduler grants opens the gate of the job's turns or operations on the permit's nodes;
the gate closes when the phase is over, cut or lost. A job without a permit has both gates closed;
beside the tail of another rollout a job has the instances that the tail left, where there are any.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from slackwater.control.coschedule import commands as do
from slackwater.control.coschedule import events as on
from slackwater.control.coschedule import phase_commands as phase_do
from slackwater.control.coschedule.job_phases import Hold, JobPhases
from slackwater.control.coschedule.job_state import JobStatus
from slackwater.control.coschedule.permits import Permits
from slackwater.control.coschedule.phase_limits import PhaseLimits
from slackwater.control.coschedule.phase_profiler import PhaseProfiler
from slackwater.control.coschedule.phase_watch import IdleRule, PhaseWatch
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.control.jobs import events as of_job
from slackwater.control.operations.events import OpsGated
from slackwater.control.rollout.events import JobGated
from slackwater.control.timer import SetTimer
from slackwater.model.ids import InstanceId, JobId, NodeId
from slackwater.model.placement import Phase, overlap

COSCHEDULE = "coschedule:"
REST = f"{COSCHEDULE}rest "

EnginesOn = Callable[[Sequence[NodeId], JobId], list[InstanceId]]

Said: TypeAlias = (
    do.Command
    | phase_do.PhaseCommand
    | JobGated
    | of_job.JobAnswered
    | of_job.JobProfiled
    | of_job.IterationDone
    | of_job.JobCrashed
    | of_job.JobEnded
)


class PhaseGates:
    """Looks at `jobs` and changes nothing. `engines_on` names the instances of nodes, those with
    most of a job's turns first.
    """

    def __init__(
        self, jobs: Mapping[JobId, JobPhases], permits: Permits, engines_on: EnginesOn
    ) -> None:
        self._jobs = jobs
        self._permits = permits
        self._engines_on = engines_on

    def of_turns(self, one: JobPhases, now_s: float) -> JobGated:
        """As its permit says; beside a tail of another rollout, on the other instances where there
        are any.
        """
        but: tuple[InstanceId, ...] = ()
        hold = one.hold
        if hold is not None and hold.phase is Phase.ROLLOUT and hold.kept is None:
            kept = {name for other in self._tails(hold.nodes, one.job) for name in other}
            if kept and set(self._engines_on(hold.nodes, one.job)) - kept:
                but = tuple(sorted(kept))
        return JobGated(now_s, one.job, one.gate(but))

    def of_both(self, one: JobPhases, now_s: float) -> tuple[JobGated, OpsGated]:
        """Of a job without a permit: closed."""
        return self.of_turns(one, now_s), OpsGated(now_s, one.job, ())

    def after(self, one: JobPhases, hold: Hold, now_s: float) -> JobGated | OpsGated:
        """The gate that a permit had opened closes with it."""
        return (
            self.of_turns(one, now_s)
            if hold.phase is Phase.ROLLOUT
            else OpsGated(now_s, one.job, ())
        )

    def beside(self, nodes: Sequence[NodeId], now_s: float) -> list[JobGated]:
        """A tail is over: whoever rolled out beside it has its instances too."""
        return [
            self.of_turns(other, now_s)
            for other in self._jobs.values()
            if other.hold is not None
            and other.hold.phase is Phase.ROLLOUT
            and any(overlap(node, place) for node in nodes for place in other.hold.nodes)
        ]

    def kept_for_tail(self, job: JobId, hold: Hold, share: float) -> tuple[InstanceId, ...] | None:
        """The instances on which a rollout's last turns end: that share of its own, and at least
        one.
        """
        engines = self._engines_on(hold.nodes, job)
        return tuple(engines[: max(int(len(engines) * share), 1)]) or None

    def _tails(self, nodes: Sequence[NodeId], but: JobId) -> list[tuple[InstanceId, ...]]:
        found = []
        for permit in self._permits.tails_on(nodes):
            other = self._jobs.get(permit.job)
            if permit.job != but and other is not None and other.hold is not None:
                found.append(other.hold.kept or ())
        return found


class PhaseCycle:
    """Of all `jobs`. `out` is what was said since the event at `now_s`, `queue` what the
    co-scheduler said and nobody has carried out.
    """

    def __init__(
        self,
        jobs: Mapping[JobId, JobPhases],
        scheduler: CoScheduler,
        engines_on: EnginesOn,
        limits: PhaseLimits,
    ) -> None:
        self._jobs = jobs
        self.scheduler = scheduler
        self.limits = limits
        self.watcher = PhaseWatch(scheduler, limits)
        self.profiler = PhaseProfiler(scheduler, limits)
        self.gates = PhaseGates(jobs, scheduler.permits, engines_on)
        self.queue: deque[do.Command] = deque()
        self.out: list[Said] = []
        self.now_s = 0.0

    def cut_short(self, one: JobPhases) -> None:
        """End the phase of a job that is being profiled. Training with nothing left open is over;
        what else it has still open goes on with its next one.
        """
        assert one.hold is not None
        if one.hold.phase is Phase.TRAIN and not one.ops:
            self.finish(one, max(self.now_s - one.hold.since_s, 1e-9))
            return
        hold = one.cut(self.now_s)
        self._close(one, hold, "")
        ended = (self.now_s, one.job, hold.permit, 0.0)
        self.tell(on.PhaseFinished(*ended, cut=True, step_s=hold.longest_step_s))
        self.look(one)

    def look(self, one: JobPhases) -> None:
        """A job did something: its phase may be over, and its next one may be wanted."""
        if one.away and one.wanted(Phase.ROLLOUT) is not None:
            self.come_back(one)
            return
        if one.must_drain():
            one.drain()
            self.gate_turns(one)
        if one.is_over():
            assert one.hold is not None
            self.finish(one, max(self.now_s - one.hold.since_s, 1e-9))
            return
        if one.is_quiet:
            self.await_rest(one)
        expected = self.scheduler.next_phase(one.job)
        if one.hold is not None or one.requested_s is not None or expected is None:
            return
        wanted = one.wanted(expected)
        if one.epoch is None or wanted is None:
            return
        skips = expected is Phase.ROLLOUT and self.scheduler.is_guest(one.job)
        if wanted is not expected and (one.cut_s or skips):
            # The phase was over where it was cut, or it would wait for nodes that it has no use of.
            one.end_cut(expected)
            self.scheduler.skip_phase(one.job)
            expected = wanted
        if expected is Phase.ROLLOUT and one.trained_s is not None:
            one.seen.setdefault(Phase.SYNC, []).append(self.now_s - one.trained_s)
            one.trained_s = None
        one.requested_s = self.now_s
        self.tell(on.PhaseRequested(self.now_s, one.job, one.epoch, expected, self._iteration(one)))

    def _iteration(self, one: JobPhases) -> int:
        state = self.scheduler.find(one.job)
        guest = self.scheduler.is_guest(one.job) or state is None
        return one.iteration if guest or state is None else state.iterations_done

    def finish(self, one: JobPhases, work_s: float) -> None:
        """A phase ended by itself; without work it was skipped."""
        assert one.hold is not None
        permit, step_s = one.hold.permit, one.hold.longest_step_s
        self.told_finished(on.PhaseFinished(self.now_s, one.job, permit, work_s, step_s=step_s))

    def told_finished(self, event: on.PhaseFinished) -> None:
        job, permit, work_s = event.job, event.permit, event.work_s
        one = self._jobs.get(job)
        if one is None or one.hold is None or one.hold.permit != permit:
            self.tell(event)
            return
        hold = one.end(self.now_s, work_s)
        self._close(one, hold, "")
        if hold.phase is Phase.TRAIN:
            one.iteration += 1
            self.out.append(of_job.IterationDone(self.now_s, job))
        self.tell(event)
        if hold.kept:
            self.out += self.gates.beside(hold.nodes, self.now_s)
        profile = self.profiler.profile(one) if hold.phase is Phase.TRAIN else None
        done = one.asks and hold.phase is Phase.TRAIN and one.iteration >= one.terms.iterations
        if profile is not None:
            self.out.append(of_job.JobProfiled(self.now_s, job, profile))
        elif done:
            self.out.append(of_job.JobEnded(self.now_s, job, "finished", "made its iterations"))
        else:
            self.look(one)
            if one.is_idle:
                one.idle_since_s = self.now_s
                self.await_rest(one)

    def await_rest(self, one: JobPhases) -> None:
        """Look again when it has been still for as long as makes a rest; it has one such timer."""
        if one.rest_due_s is None or one.rest_due_s <= self.now_s:
            one.rest_due_s = self.now_s + self.limits.rest_s
            self.out.append(SetTimer(f"{REST}{one.job}", one.rest_due_s))

    def still(self, one: JobPhases | None) -> None:
        """Its timer fired: it may have asked for nothing for a while."""
        if one is None:
            return
        one.rest_due_s = None
        match self.watcher.stillness(one, self.now_s):
            case IdleRule.LOOK_AGAIN:
                self.await_rest(one)
            case IdleRule.END_PHASE:
                self.end_quiet(one)
            case IdleRule.REST:
                self.tell(on.JobRests(self.now_s, one.job, one.epoch or 0))
                if self.scheduler.holds_jobs:
                    self.await_rest(one)
            case IdleRule.MAKE_ROOM:
                self._make_room(one)
            case None:
                pass

    def _make_room(self, one: JobPhases) -> None:
        """Another job may have its place until it has something to do again."""
        self.tell(on.JobYields(self.now_s, one.job, one.epoch or 0))
        state = self.scheduler.find(one.job)
        if state is not None and state.status is JobStatus.AWAY:
            one.epoch, one.away = None, True

    def come_back(self, one: JobPhases) -> None:
        """It has something to do again, and wants a place as any other job."""
        state = self.scheduler.find(one.job)
        one.away = False
        if state is not None and state.status is JobStatus.AWAY:
            done = (state.iterations_done, state.crashes)
            self.tell(on.JobArrived(self.now_s, state.spec, *done))

    def end_quiet(self, one: JobPhases) -> None:
        """Its phase was over when the last of its turns or operations was."""
        assert one.hold is not None
        self.finish(one, max(one.hold.heard_s - one.hold.since_s, 0.0))

    def lose(self, one: JobPhases, why: str) -> None:
        """Its permit, if it has one, is gone, and `why` if nobody gave it back; its gates are
        closed.
        """
        one.requested_s, one.cut_s = None, 0.0
        if one.hold is not None:
            hold = one.end(self.now_s, 0.0)
            self._close(one, hold, why)
            if hold.kept:
                self.out += self.gates.beside(hold.nodes, self.now_s)

    def crash(self, one: JobPhases, why: str) -> None:
        """It had its chance: another has the nodes, and it comes again, unless that happened too
        often.
        """
        one.strikes += 1
        self.lose(one, why)
        epoch, one.epoch = one.epoch or 0, None
        self.tell(on.JobCrashReported(self.now_s, one.job, epoch))
        if one.strikes >= self.limits.strikes:
            self.out.append(of_job.JobEnded(self.now_s, one.job, "failed", why))
        else:
            self.out.append(of_job.JobCrashed(self.now_s, one.job, why))

    def tell(self, event: on.Event) -> None:
        self.queue.extend(self.scheduler.handle(event))

    def granted(self, command: do.GrantPermit) -> None:
        one = self._jobs[command.job]
        held = self.scheduler.permits.find(command.permit)
        if held is None:
            return  # it was taken back by what followed from the same event
        ask, now_s = one.ask, self.now_s
        expected = command.phase
        known_as = command.permit
        if ask is not None and ask.phase is expected and ask.known_as is not None:
            known_as = ask.known_as
        hold = Hold(*(command.permit, known_as, expected, command.nodes, now_s, now_s))
        hold.switch = command.switch
        if one.asks and one.heard_s is not None:
            hold.heard_s = one.heard_s  # it may have been killed while it waited
        wanted = one.wanted(expected) if one.requested_s is not None else expected
        asked = one.requested_s is not None and ask is not None
        one.begin(hold)
        if wanted is not expected:  # a phase that it has nothing to do in
            one.ask = ask
            self.finish(one, 0.0)
            return
        self.out.append(
            phase_do.PermitGiven(
                *(one.job, known_as, hold.phase, one.iteration if ask is None else ask.iteration),
                *(hold.nodes, hold.switch, asked),
            )
        )
        if hold.phase is Phase.ROLLOUT:
            self.gate_turns(one)
        else:
            self.out.append(OpsGated(now_s, one.job, hold.nodes))
        self.look(one)

    def shrink(self, one: JobPhases, permit: int) -> None:
        hold = one.hold
        if hold is None or hold.permit != permit:
            return
        hold.kept = self.gates.kept_for_tail(one.job, hold, self.limits.kept_share)
        self.gate_turns(one)
        self.out.append(phase_do.PermitShrunk(one.job, hold.known_as))

    def _close(self, one: JobPhases, hold: Hold, lost: str) -> None:
        self.out.append(self.gates.after(one, hold, self.now_s))
        self.out.append(phase_do.PermitEnded(one.job, hold.known_as, lost))

    def gate_turns(self, one: JobPhases) -> None:
        self.out.append(self.gates.of_turns(one, self.now_s))
