"""The simulated runtime of the co-scheduler: cost models answer its commands with later events in
virtual time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from slackwater.control.controller import CheckedController
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
    Event,
    JobArrived,
    JobCrashReported,
    JobFinished,
    NodeLost,
    PhaseFinished,
    PhaseRequested,
    TailReached,
)
from slackwater.control.driver import Driver
from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Phase, node_of
from slackwater.sim.cluster.job_execution import JobExecution, PhaseRun
from slackwater.sim.cluster.ledger import FleetAccount, PoolAccount
from slackwater.sim.cluster.lengths import draw_shares
from slackwater.sim.cluster.scenario import ClusterScenario
from slackwater.sim.core.queue import EventQueue

# A scheduled call: a function and its arguments.
Due = tuple[Callable[..., None], tuple[Any, ...]]


class SimulatedCluster:
    """Drives a controller through a scenario. Every `check_every` events, and at the end, it checks
    the controller's invariants.
    """

    def __init__(
        self,
        scenario: ClusterScenario,
        specs: Sequence[JobSpec],
        controller: CheckedController[Event, Command],
        *,
        keep_spans: bool = False,
        check_every: int = 2000,
        record: Callable[[bytes], None] | None = None,
    ) -> None:
        self._scenario = scenario
        self._controller = controller
        self._check_every = check_every
        self._queue: EventQueue[Due] = EventQueue()
        self._driver = Driver(
            controller,
            self._execute,
            clock=lambda: self._queue.now_s,
            schedule=self._schedule,
            record=record,
            deliver=self._tell,
            handled=self._check,
        )
        self._fleet = scenario.view()
        self.account = FleetAccount(
            {pool.role: PoolAccount(pool.node_type) for pool in scenario.fleet}, keep_spans
        )
        self.tail_migrations = 0
        self.refusals: list[tuple[JobId, str]] = []
        self.executions: dict[JobId, JobExecution] = {}
        self._runs: dict[int, PhaseRun] = {}
        self._tails: dict[NodeId, PhaseRun] = {}
        self._users: dict[NodeId, PhaseRun] = {}
        self._unsettled = 0
        self._doubled_share = scenario.faults.doubled_message_share
        self._faults = np.random.default_rng([scenario.seed, 2])
        last = {spec.arrival_s: number for number, spec in enumerate(specs)}
        for number, asked in enumerate(specs):
            spec = replace(asked, profile=self._fleet.with_node_counts(asked.profile))
            shares = draw_shares(spec, number, scenario)
            self.executions[spec.job] = JobExecution(spec, shares, self._fleet, scenario.switching)
            self._unsettled += 1
            follow = number != last[spec.arrival_s]
            self._schedule(spec.arrival_s, self._arrive, spec, 0, 0, follow)
        self._next_fault(self._crash_some_job, scenario.faults.job_crashes_per_h)
        self._next_fault(self._lose_some_node, scenario.faults.node_losses_per_h)

    @property
    def now_s(self) -> float:
        return self._queue.now_s

    @property
    def events(self) -> int:
        return self._driver.events

    @property
    def settled(self) -> int:
        """Jobs that finished or were refused."""
        return len(self.executions) - self._unsettled

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """Run until every job has finished or was refused."""
        report_at = 0
        while self._unsettled:
            assert len(self._queue), (
                f"{self._unsettled} jobs wait for ever: {self._list_unfinished()}"
            )
            function, arguments = self._queue.pop()
            function(*arguments)
            if progress is not None and self.events >= report_at:
                report_at = self.events + 5000
                progress(self.settled / len(self.executions))
        self._controller.check_integrity()
        self.account.give_back(tuple(self.account.list_rented()), self.now_s)

    def _list_unfinished(self) -> list[JobId]:
        runs = self.executions.items()
        return [job for job, run in runs if run.account.finished_s is None][:5]

    def _schedule(self, at_s: float, function: Callable[..., None], *arguments: Any) -> None:
        self._queue.push(at_s, (function, arguments))

    # Events to the controller, and its commands.

    def _tell(self, event: Event) -> None:
        self._driver.feed(event)
        if isinstance(event, TimerFired):
            return  # no message
        if self._doubled_share and self._faults.random() < self._doubled_share:
            late_s = self.now_s + float(self._faults.exponential(60.0))
            self._schedule(late_s, self._redeliver, event)

    def _redeliver(self, event: Event) -> None:
        """Deliver a message a second time, as received now."""
        self._driver.feed(msgspec.structs.replace(event, now_s=self.now_s))

    def _check(self) -> None:
        if self.events % self._check_every == 0:
            self._controller.check_integrity()

    def _execute(self, command: Command) -> None:
        match command:
            case GrantPermit():
                self._begin(command)
            case StartJob():
                self._start(command)
            case StopJob():
                execution = self.executions[command.job]
                self._stop(execution) if command.moves else self._die(execution)
            case RentNodes():
                self.account.rent(command.nodes, self.now_s)
            case ReturnNodes():
                self.account.give_back(command.nodes, self.now_s)
            case ShrinkRollout():
                self._shrink(self._runs[command.permit])
            case HoldJob():
                self.executions[command.job].account.reason = command.reason
            case RefuseJob():
                self.executions[command.job].account.reason = command.reason
                self.refusals.append((command.job, command.reason))
                self._unsettled -= 1

    # A job's life.

    def _arrive(
        self, spec: JobSpec, iterations_done: int, crashes: int, others_follow: bool = False
    ) -> None:
        self._tell(JobArrived(self.now_s, spec, iterations_done, crashes, others_follow))

    def _start(self, command: StartJob) -> None:
        execution = self.executions[command.job]
        account = execution.account
        billions = execution.spec.profile.model_billions
        load_s = self._scenario.switching.cold_s(billions)
        if account.settle(command.group, self.now_s):
            load_s = self._fleet.move.restart_s(execution.spec.profile)
        if account.placed_s is None:
            account.placed_s = self.now_s
            account.strategy = command.strategy
        account.reason = command.reason
        execution.epoch = command.epoch
        execution.iteration = command.iterations_done
        local = command.rollout_nodes == command.train_nodes
        execution.settle(local=local, train_nodes=len(command.train_nodes))
        loaded_s = self.now_s + load_s
        if execution.iteration < execution.spec.iterations:
            self._schedule(loaded_s, self._request, execution, execution.epoch, Phase.ROLLOUT)
        else:  # It crashed in the sync after its last iteration.
            self._schedule(loaded_s, self._complete, execution, execution.epoch)

    def _request(self, execution: JobExecution, epoch: int, phase: Phase) -> None:
        if execution.epoch == epoch:
            self._tell(
                PhaseRequested(self.now_s, execution.spec.job, epoch, phase, execution.iteration)
            )

    def _begin(self, command: GrantPermit) -> None:
        execution = self.executions[command.job]
        now_s = self.now_s
        execution.account.start_phase(now_s)
        phase = command.phase
        work_s = execution.work_s[phase][execution.iteration]
        switch_s = execution.warm_s if command.switch else 0.0
        length_s = work_s * execution.scale(phase)
        tail_left_s = None
        if phase is Phase.ROLLOUT and self._scenario.tail.enabled:
            share = execution.tails[execution.iteration]
            tail_left_s = switch_s + length_s * share if share < 1 else None
        run = PhaseRun(
            command.permit, execution, phase, command.nodes, now_s, switch_s, work_s,
            switch_s + length_s, tail_left_s, now_s,
        )  # fmt: skip
        self.account.switches += command.switch
        execution.run = run
        self._runs[command.permit] = run
        for node in command.nodes:
            self._users[node] = run
        if self._tails:
            run.speed = self._speed(run)
        self._expect(run)

    def _expect(self, run: PhaseRun) -> None:
        """Schedule the tail and the end of a run at its present speed."""
        end_s = run.at_s + run.left_s / run.speed
        if run.tail_left_s is not None:
            tail_s = run.at_s + run.tail_left_s / run.speed
            if tail_s < end_s:
                self._schedule(tail_s, self._reach_tail, run, run.version)
        self._schedule(end_s, self._finish, run, run.version)

    def _reach_tail(self, run: PhaseRun, version: int) -> None:
        if run.version == version and run.permit in self._runs:
            run.tail_left_s = None
            self._tell(TailReached(self.now_s, run.execution.spec.job, run.permit))

    def _finish(self, run: PhaseRun, version: int) -> None:
        if run.version != version or run.permit not in self._runs:
            return
        execution = run.execution
        self._end(run)
        last = run.phase is Phase.TRAIN
        if last:
            execution.account.end_iteration(self.now_s + execution.sync_s, execution.solo_s())
            execution.iteration += 1
        epoch = execution.epoch
        self._tell(PhaseFinished(self.now_s, execution.spec.job, run.permit, run.work_s))
        if not last:
            self._request(execution, epoch, Phase.TRAIN)
        elif execution.iteration < execution.spec.iterations:
            self._schedule(
                self.now_s + execution.sync_s, self._request, execution, epoch, Phase.ROLLOUT
            )
        else:
            self._schedule(self.now_s + execution.sync_s, self._complete, execution, epoch)

    def _complete(self, execution: JobExecution, epoch: int) -> None:
        if execution.epoch != epoch:
            return
        execution.account.finished_s = self.now_s
        execution.epoch = 0
        self._unsettled -= 1
        self._tell(JobFinished(self.now_s, execution.spec.job, epoch))

    def _end(self, run: PhaseRun) -> None:
        """End a run; runs beside its tail get its devices."""
        now_s = self.now_s
        del self._runs[run.permit]
        run.execution.run = None
        switched_s = min(run.began_s + run.switch_s, now_s)
        if run.speed < 1:
            run.advance(now_s)
        self.account.record_phase(
            run.execution.spec.job, run.phase, run.nodes, (run.began_s, switched_s, now_s),
            run.shrunk_s, self._scenario.tail.keep_share, run.beside_s,
        )  # fmt: skip
        table = self._users if run.shrunk_s is None else self._tails
        for node in run.nodes:
            if table.get(node) is run:
                del table[node]
        if run.shrunk_s is not None:
            self._change_speeds(run.nodes)

    def _shrink(self, run: PhaseRun) -> None:
        run.shrunk_s = self.now_s
        self.tail_migrations += 1
        for node in run.nodes:
            del self._users[node]
            self._tails[node] = run

    def _speed(self, run: PhaseRun) -> float:
        kept = self._scenario.tail.keep_share
        taken = sum(node in self._tails and self._tails[node] is not run for node in run.nodes)
        return 1 - kept * taken / len(run.nodes)

    def _change_speeds(self, nodes: tuple[NodeId, ...]) -> None:
        for run in {id(self._users[n]): self._users[n] for n in nodes if n in self._users}.values():
            run.advance(self.now_s)
            run.speed = self._speed(run)
            run.version += 1
            self._expect(run)

    def _stop(self, execution: JobExecution) -> None:
        """End its processes where they are."""
        if execution.run is not None:
            self._end(execution.run)
        execution.epoch = 0

    # Faults.

    def _next_fault(self, function: Callable[[], None], per_h: float) -> None:
        if per_h > 0:
            gap_s = float(self._faults.exponential(3600 / per_h))
            self._schedule(self.now_s + gap_s, function)

    def _crash_some_job(self) -> None:
        self._next_fault(self._crash_some_job, self._scenario.faults.job_crashes_per_h)
        alive = [execution for execution in self.executions.values() if execution.epoch > 0]
        if alive:
            execution = alive[int(self._faults.integers(len(alive)))]
            epoch = execution.epoch
            self._die(execution)
            self._tell(JobCrashReported(self.now_s, execution.spec.job, epoch))

    def _lose_some_node(self) -> None:
        self._next_fault(self._lose_some_node, self._scenario.faults.node_losses_per_h)
        rented = self.account.list_rented()
        if rented:
            node = rented[int(self._faults.integers(len(rented)))]
            self._tell(NodeLost(self.now_s, node_of(node)))

    def _die(self, execution: JobExecution) -> None:
        self._stop(execution)
        account = execution.account
        account.record_crash()
        back_s = self.now_s + self._scenario.faults.repair_s
        self._schedule(
            back_s, self._arrive, execution.spec, account.iterations_done, account.crashes
        )
