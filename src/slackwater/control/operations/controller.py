"""Which trainer runs which operation when (PlexRL 4.2: one deployment's operations run in order,
one at a time).

Invariants: an operation runs only when all before it are over; a trainer does one thing at a time;
a model's state is never used unless it is the saved state plus the whole log, applied in order; a
request ends exactly once. When a trainer is lost, its models come back elsewhere from the last
saved state by replaying the log, and the operation that was running runs again. A model whose
permit is for another node moves there with its state; where that fails, it comes there in the same
way as from a trainer that was lost.
"""

from collections.abc import Sequence
from typing import assert_never

from slackwater.control.operations import commands as do
from slackwater.control.operations import events as on
from slackwater.control.operations.facts import OpOver, PublishDetached
from slackwater.control.operations.flights import (
    DetachedPublish,
    Flight,
    Replay,
    Restore,
    RunHead,
    SnapshotFlight,
    runs_head,
)
from slackwater.control.operations.integrity import check_lines
from slackwater.control.operations.model_queue import ModelQueue, Residency, StateTransfer
from slackwater.control.operations.settings import OperationsConfig
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import JobId, ModelId, NodeId, TenantId, WorkerId
from slackwater.model.operation import FaultOwner, Operation, OpKind

OPERATIONS = ("gap:", "move:")  # how the names of its timers begin


class OperationsController:
    """A state machine without I/O over all models and trainers."""

    def __init__(self, config: OperationsConfig | None = None) -> None:
        self._config = config or OperationsConfig()
        self._lines: dict[ModelId, ModelQueue] = {}
        self._flights: dict[WorkerId, Flight | None] = {}
        self._aside: dict[int, DetachedPublish] = {}
        self._last_served: dict[ModelId, int] = {}
        self._last_owned: dict[TenantId, int] = {}
        self._nodes: dict[WorkerId, NodeId | None] = {}
        self._gates: dict[JobId, tuple[NodeId, ...]] = {}
        self._tickets = 0
        self._now_s = 0.0
        self._out: list[do.Command] = []

    def handle(self, event: on.Event) -> Sequence[do.Command]:
        """Take one event, return what is to be done about it, in order."""
        self._out, self._now_s = [], event.now_s
        match event:
            case on.ModelAdopted(_, model, saved_seq, records, owner):
                line = self._lines[model] = ModelQueue(model, owner)
                line.adopt(saved_seq, records)
            case on.OpSubmitted(_, operation, owner):
                self._submitted(operation, owner)
            case on.OpRejected(_, operation, reason):
                self._rejected(operation, reason)
            case on.ModelClosed(_, model, reason):
                self._close(model, reason)
            case on.TrainerJoined(_, worker, node):
                self._flights.setdefault(worker, None)
                self._nodes[worker] = node
            case on.OpsGated(_, job, nodes):
                self._gate(job, nodes)
            case on.StateMoved(_, model, ticket, error):
                self._moved(model, ticket, error)
            case on.TrainerLost(_, worker, reason):
                self._lost(worker, reason)
            case on.TicketDetached(_, worker, ticket):
                self._set_aside(worker, ticket)
            case on.TicketDone() | on.TicketFailed():
                self._reported(event)
            case TimerFired(_, name):
                self._timer(name)
            case _:
                assert_never(event)
        self._move_away(event.now_s)
        self._dispatch()
        self._watch_gaps(event.now_s)
        return self._out

    # ---- questions the body may ask ----
    def check_number(self, model: ModelId, seq: int) -> None:
        """Raise if a number lies too far ahead of the model's next one."""
        line = self._lines.get(model) or ModelQueue(model)
        last = line.next_seq + self._config.max_skipped
        if seq > last and not line.knows(seq):
            raise ConfigError.of(
                "seq_id", seq, f"must be at most {last}: the next one is {line.next_seq}"
            )

    def check_room(self, model: ModelId) -> None:
        """Raise if a model has more waiting than it may."""
        line = self._lines.get(model)
        if line is not None and len(line.waiting) >= self._config.max_waiting_per_model:
            raise UnavailableError(f"model {model}: {len(line.waiting)} operations are waiting")

    def waiting(self) -> dict[ModelId, int]:
        """How many operations wait, by model."""
        return {model: len(line.waiting) for model, line in self._lines.items()}

    def gates(self) -> dict[JobId, tuple[NodeId, ...]]:
        """Where jobs that share nodes may train now."""
        return dict(self._gates)

    def holders(self) -> dict[ModelId, WorkerId]:
        """Which trainer has the state of which model."""
        held = ((model, line.worker) for model, line in self._lines.items())
        return {model: worker for model, worker in held if worker is not None}

    # ---- arrivals ----
    def _submitted(self, operation: Operation, owner: TenantId) -> None:
        line = self._lines.setdefault(operation.model, ModelQueue(operation.model, owner))
        if line.knows(operation.seq):
            self._fail(operation, f"seq_id {operation.seq} was used up before", FaultOwner.USER)
            return
        line.waiting[operation.seq] = operation
        line.job = operation.job or line.job
        line.skip_refused()

    def _rejected(self, operation: Operation, reason: str) -> None:
        line = self._lines.get(operation.model)
        if line is None or line.knows(operation.seq):
            return
        line.refused[operation.seq] = (operation, reason)
        line.skip_refused()

    def _watch_gaps(self, now_s: float) -> None:
        """Start the clock of every missing number whose turn it is, whatever event made it so."""
        for line in self._lines.values():
            if line.has_gap() and line.watched_seq != line.next_seq:
                line.watched_seq = line.next_seq
                at_s = now_s + self._config.give_up_gap_after_s
                self._out.append(SetTimer(f"gap:{line.next_seq}:{line.model}", at_s))

    def _timer(self, name: str) -> None:
        kind, seq, model = name.split(":", 2)
        line = self._lines.get(ModelId(model))
        if kind == "gap" and line is not None and line.next_seq == int(seq) and line.has_gap():
            line.give_up_gap()
        if kind == "move" and line is not None and line.move and line.move.ticket == int(seq):
            self._moved(line.model, int(seq), "nothing was heard of it")

    def _close(self, model: ModelId, reason: str) -> None:
        line = self._lines.pop(model, None)
        if line is None:
            return
        self._last_served.pop(model, None)
        over = {**line.aside, **line.waiting}
        for _, operation in sorted(over.items()):
            self._fail(operation, reason, FaultOwner.USER)
        line.waiting.clear()
        line.aside.clear()
        self._forget(line)
        self._out.append(do.ForgetStrays(model))

    def _forget(self, line: ModelQueue) -> None:
        """Let the trainer drop a state that is no longer wanted or trusted."""
        if line.worker is not None:
            self._out.append(do.ForgetModel(line.worker, line.model))
        line.lose_state()

    # ---- trainers ----
    def _lost(self, worker: WorkerId, reason: str) -> None:
        flight = self._flights.pop(worker, None)
        self._nodes.pop(worker, None)
        for line in self._lines.values():
            if line.worker == worker:
                line.lose_state()
        for ticket in [t for t, aside in self._aside.items() if aside.worker == worker]:
            unwritten = self._aside.pop(ticket).line
            if unwritten.model in self._lines:
                self._restore_failed(unwritten, f"trainer lost: {reason}")
        if flight is None or flight.line.model not in self._lines:
            return
        line = flight.line
        if isinstance(flight, Restore | Replay):
            self._restore_failed(line, f"trainer lost: {reason}")
        if not runs_head(flight):
            return
        line.attempts += 1
        if line.attempts >= self._config.max_attempts:
            why = f"the trainer was lost {line.attempts} times while running it: {reason}"
            self._fail(line.fail_head(why), why, FaultOwner.SERVER)

    def _reported(self, event: on.TicketDone | on.TicketFailed) -> None:
        """A trainer says how something ended: what it was doing, or what it wrote beside."""
        flight = self._land(event.worker, event.ticket)
        over = None if flight is not None else self._over_aside(event.worker, event.ticket)
        match event:
            case on.TicketDone() if flight is not None:
                self._done(flight, event)
            case on.TicketFailed() if flight is not None:
                self._failed(flight, event)
            case on.TicketDone() if over is not None:
                self._complete(over, event.ticket)
            case on.TicketFailed() if over is not None:
                self._fail(over, event.error, event.owner)
            case _:
                pass  # about a trainer or a model that is gone

    def _set_aside(self, worker: WorkerId, ticket: int) -> None:
        """The trainer is free for what comes next; the publish is over when its writing is."""
        flight = self._flights.get(worker)
        if flight is None or flight.ticket != ticket or flight.line.model not in self._lines:
            if flight is not None and flight.ticket == ticket:
                self._flights[worker] = None
            return
        line = flight.line
        if runs_head(flight):
            head = line.head()
            if head is None or head.kind is not OpKind.PUBLISH:
                return  # only a publish leaves the state alone
            operation: Operation | None = line.set_head_aside()
            line.skip_refused()
        else:
            operation = flight.entry.operation if isinstance(flight, Replay) else None
            entry = line.log[line.applied] if line.applied < len(line.log) else None
            if entry is None or entry.operation is not operation:
                self._flights[worker] = None  # written meanwhile, by the trainer that had it before
                return
            if operation.seq not in line.aside:
                return
            line.applied += 1
        assert operation is not None
        self._flights[worker] = None
        self._aside[ticket] = DetachedPublish(worker, line, operation)
        self._out.append(PublishDetached(self._now_s, operation.job, operation.request))

    def _over_aside(self, worker: WorkerId, ticket: int) -> Operation | None:
        """The publish that a report is about, which is over now."""
        aside = self._aside.get(ticket)
        if aside is None or aside.worker != worker:
            return None
        del self._aside[ticket]
        line = aside.line
        if self._lines.get(line.model) is not line or aside.operation.seq not in line.aside:
            return None
        aside.line.finish_aside(aside.operation)
        return aside.operation

    def _land(self, worker: WorkerId, ticket: int) -> Flight | None:
        """The flight that a report is about; stale reports are about none."""
        flight = self._flights.get(worker)
        if flight is None or flight.ticket != ticket:
            return None
        self._flights[worker] = None
        return flight if flight.line.model in self._lines else None

    def _restore_failed(self, line: ModelQueue, why: str) -> None:
        """Try again; after too many failures at the same place, fail what waits and say why."""
        line.failed_restores += 1
        if line.failed_restores < self._config.max_attempts:
            return
        line.failed_restores = 0
        for unwritten in list(line.aside.values()):
            error = f"version of seq {unwritten.seq} cannot be written: {why}"
            self._fail(unwritten, error, FaultOwner.SERVER)
            line.finish_aside(unwritten)
        while (operation := line.head()) is not None:
            error = f"model {line.model} cannot be brought back: {why}"
            self._fail(operation, error, FaultOwner.SERVER)
            line.fail_head(why)
            line.skip_refused()

    def _fail(self, operation: Operation, error: str, owner: FaultOwner) -> None:
        self._out.append(do.FailOp(operation.request, error, owner))
        over = (operation.job, operation.request, operation.kind)
        self._out.append(OpOver(self._now_s, *over, done=False))

    def _complete(self, operation: Operation, ticket: int) -> None:
        self._out.append(do.CompleteOp(operation.request, ticket))
        over = (operation.job, operation.request, operation.kind)
        self._out.append(OpOver(self._now_s, *over, done=True))

    def _order(self, line: ModelQueue, order: do.TrainerOrder) -> None:
        """Send it to the trainer once that has its devices, on the account of the model's job."""
        self._out.append(do.StartWork(self._now_s, order.worker, line.job, order))

    # ---- dispatch ----
    def _dispatch(self) -> None:
        """Give every idle trainer work: first the owner served longest ago, then its model."""
        for worker in sorted(worker for worker, flight in self._flights.items() if flight is None):
            while self._flights[worker] is None and (line := self._pick(worker)) is not None:
                self._next(worker, line)

    # ---- moves ----
    def _move_away(self, now_s: float) -> None:
        """A state that waits where its permit is not goes to a trainer that has it."""
        if not self._gates:
            return
        busy = {id(flight.line) for flight in self._flights.values() if flight is not None}
        for line in self._lines.values():
            if line.worker is None or line.move or id(line) in busy or self._may(line, line.worker):
                continue
            able = [worker for worker in sorted(self._flights) if self._may(line, worker)]
            if not able:
                continue  # a closed gate, or nobody there yet
            if line.usable_state() < 0 or line.residency is Residency.ABSENT:
                self._forget(line)  # it must be made from the log anyhow
                continue
            loads = self._loads()
            self._tickets += 1
            line.move = StateTransfer(
                self._tickets, min(able, key=lambda worker: (loads[worker], worker))
            )
            named = (line.worker, line.move.ticket, line.model, line.move.to)
            self._out.append(do.MoveState(*named))
            at_s = now_s + self._config.give_up_move_after_s
            self._out.append(SetTimer(f"move:{line.move.ticket}:{line.model}", at_s))

    def _moved(self, model: ModelId, ticket: int, error: str) -> None:
        """The trainer there finds the state when it restores the model; after an error, none."""
        line = self._lines.get(model)
        move = None if line is None else line.move
        if line is None or move is None or move.ticket != ticket:
            self._out.append(do.ForgetStrays(model))  # it came too late
            return
        self._forget(line)
        if not error and move.to in self._flights:
            line.worker = move.to

    def _gate(self, job: JobId, nodes: tuple[NodeId, ...] | None) -> None:
        if nodes is None:
            self._gates.pop(job, None)
        else:
            self._gates[job] = nodes

    def _may(self, line: ModelQueue, worker: WorkerId) -> bool:
        """Whether the head may run there: passes and steps of a gated job need its permit."""
        head = line.head()
        if not self._gates or head is None or not head.kind.needs_permit:
            return True
        nodes = self._gates.get(head.job)
        return nodes is None or self._nodes.get(worker) in nodes

    def _pick(self, worker: WorkerId) -> ModelQueue | None:
        loads = self._loads()
        able = [
            line
            for line in self._lines.values()
            if line.has_work()
            and line.move is None
            and self._may(line, worker)
            and (
                line.worker == worker or (line.worker is None and self._least(line, worker, loads))
            )
        ]
        return min(
            able,
            key=lambda line: (
                self._last_owned.get(line.owner, 0),
                self._last_served.get(line.model, 0),
                line.model,
            ),
            default=None,
        )

    def _loads(self) -> dict[WorkerId, int]:
        """How many models each trainer has."""
        loads = dict.fromkeys(self._flights, 0)
        for line in self._lines.values():
            if line.worker is not None:
                loads[line.worker] += 1
        return loads

    def _least(self, line: ModelQueue, worker: WorkerId, loads: dict[WorkerId, int]) -> bool:
        """Whether no trainer that may have the model has fewer."""
        return loads[worker] == min(load for one, load in loads.items() if self._may(line, one))

    def _next(self, worker: WorkerId, line: ModelQueue) -> None:
        """Bring the state there, bring it up to date, or run the head."""
        self._tickets += 1
        ticket = self._tickets
        self._last_served[line.model] = self._last_owned[line.owner] = ticket
        line.worker = worker
        if line.residency is Residency.ABSENT:
            if line.saved_seq is not None:
                self._restore(worker, ticket, line, line.saved_seq)
                return
            line.residency = Residency.READY  # nothing saved: the log, or the head, creates it
        if line.applied < len(line.log):
            self._replay(worker, ticket, line)
            return
        operation = line.head()
        if operation is None or not line.has_work():
            return  # all that it lacked was what is set aside
        if operation.kind is OpKind.OPTIM_STEP and line.poison is not None:
            why = f"{line.poison}; its gradients were dropped, the next optim_step will work again"
            self._fail(
                operation, f"optim_step seq {operation.seq} was not run: {why}", FaultOwner.USER
            )
            line.fail_head(why)
            line.skip_refused()
            return
        self._run_head(worker, ticket, line, operation)

    # ---- flights ----
    def _restore(self, worker: WorkerId, ticket: int, line: ModelQueue, seq: int) -> None:
        self._fly(worker, Restore(ticket, line))
        order = do.RestoreState(worker, ticket, line.model, seq, line.usable_state())
        self._order(line, order)

    def _replay(self, worker: WorkerId, ticket: int, line: ModelQueue) -> None:
        entry = line.log[line.applied]
        replayed = entry.operation
        self._fly(worker, Replay(ticket, line, entry))
        if entry.ran:
            usable = line.usable_state() if replayed.kind is OpKind.CREATE else -1
            self._order(line, do.RunOp(worker, ticket, replayed, replay=True, at_most=usable))
        else:
            self._order(line, do.DropGradients(worker, ticket, line.model, replayed.seq))

    def _run_head(self, worker: WorkerId, ticket: int, line: ModelQueue, op: Operation) -> None:
        self._fly(worker, RunHead(ticket, line, op))
        self._order(line, do.RunOp(worker, ticket, op, replay=False))

    def _snapshot(
        self, worker: WorkerId, line: ModelQueue, op: Operation, *, finishes: bool
    ) -> None:
        """Save the state after `op`; with `finishes` the operation is over only then."""
        self._tickets += 1
        self._fly(worker, SnapshotFlight(self._tickets, line, op, finishes))
        self._order(line, do.TakeSnapshot(worker, self._tickets, line.model, op.seq))

    def _fly(self, worker: WorkerId, flight: Flight) -> None:
        assert self._flights[worker] is None
        self._flights[worker] = flight

    def _done(self, flight: Flight, event: on.TicketDone) -> None:
        match flight:
            case Restore(_, line):
                line.residency = Residency.READY
                if event.reached is not None:
                    line.caught_up(event.reached)
                self._out.append(do.ForgetStrays(line.model))
            case Replay():
                self._replayed(flight, event)
            case RunHead():
                self._ran(flight, event)
            case SnapshotFlight(ticket, line, op, finishes):
                line.snapshot_cost_s = event.elapsed_s
                if finishes:
                    line.finish_head()
                    line.skip_refused()
                    self._complete(op, ticket)
                line.saved(op.seq)
                self._out.append(do.CommitSnapshot(line.model, op.seq))

    def _replayed(self, flight: Replay, event: on.TicketDone) -> None:
        line, entry = flight.line, flight.entry
        if entry not in line.log:
            return  # written meanwhile, by the trainer that had it before
        line.applied += 1
        if event.reached is not None:
            line.caught_up(event.reached)
        if entry.operation.kind is OpKind.CREATE:
            self._out.append(do.ForgetStrays(line.model))
        if entry.operation.seq in line.aside:  # written at last
            line.finish_aside(entry.operation)
            self._complete(entry.operation, event.ticket)
        if line.applied > line.furthest_applied:
            line.furthest_applied, line.failed_restores = line.applied, 0

    def _ran(self, flight: RunHead, event: on.TicketDone) -> None:
        line, op = flight.line, flight.operation
        if op.kind is OpKind.LOAD:  # its source may be deleted: own the state first, then say so
            self._snapshot(event.worker, line, op, finishes=True)
            return
        line.finish_head()
        line.skip_refused()
        self._complete(op, flight.ticket)
        if op.kind.changes_state:
            line.log_cost_s += event.elapsed_s
        if op.kind is OpKind.OPTIM_STEP and self._snapshot_due(line):
            self._snapshot(event.worker, line, op, finishes=False)

    def _failed(self, flight: Flight, event: on.TicketFailed) -> None:
        line = flight.line
        match flight:
            case Restore() | Replay():
                self._forget(line)
                self._restore_failed(line, event.error)
            case RunHead(_, _, op):
                line.fail_head(event.error)
                line.skip_refused()
                self._fail(op, event.error, event.owner)
                if event.state_lost:
                    self._forget(line)
            case SnapshotFlight(finishes=finishes):
                line.log_cost_s = 0.0  # try again after as much work as before
                if finishes:
                    self._fail(line.fail_head(event.error), event.error, event.owner)
                    line.skip_refused()
                if event.state_lost or finishes:
                    self._forget(line)

    def _snapshot_due(self, line: ModelQueue) -> bool:
        """Only right after an optim_step, when no gradients are pending.

        Not while a replay must make a version again.
        """
        if line.aside:
            return False
        limit_s = max(
            self._config.save_log_after_s, line.snapshot_cost_s / self._config.snapshot_share
        )
        return line.log_cost_s >= limit_s

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        check_lines(self._lines, self._flights)
        tickets = [flight.ticket for flight in self._flights.values() if flight is not None]
        assert len(tickets) == len(set(tickets))
