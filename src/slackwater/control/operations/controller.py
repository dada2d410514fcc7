"""Which trainer runs which operation when (PlexRL 4.2: operations of a deployment run in order).

Invariants: an operation runs only when all before it are over; a trainer does one thing at a time;
a model's state is used only if it is the saved state plus the whole log, applied in order; a
request ends exactly once. `state_recovery.py` brings a model's state to a trainer.
"""

from collections.abc import Sequence
from typing import assert_never

from slackwater.control.operations import commands, events
from slackwater.control.operations.facts import DispatchDue
from slackwater.control.operations.flights import Flight, Replay, Restore, RunHead, SnapshotFlight
from slackwater.control.operations.model_queue import ModelQueue, Residency
from slackwater.control.operations.operations_state import OperationsState
from slackwater.control.operations.settings import OperationsConfig
from slackwater.control.operations.state_recovery import StateRecovery
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import JobId, ModelId, NodeId, TenantId, WorkerId
from slackwater.model.operation import FaultOwner, Operation, OpKind

OPERATIONS = ("gap:", "move:")  # how the names of its timers begin


class OperationsController:
    """A state machine without I/O over all models and trainers."""

    def __init__(self, config: OperationsConfig | None = None) -> None:
        self._config = config or OperationsConfig()
        self._state = OperationsState(self._config)
        self._lines, self._flights = self._state.lines, self._state.flights
        self._recovery = StateRecovery(self._state)
        self._unsettled: set[ModelId] = set()  # after a step, until its gate is known
        self._last_served: dict[ModelId, int] = {}
        self._last_owned: dict[TenantId, int] = {}

    def handle(self, event: events.Event) -> Sequence[commands.Command]:
        """Take one event, return what is to be done about it, in order."""
        state = self._state
        state.out, state.now_s = [], event.now_s
        match event:
            case events.ModelAdopted(_, model, saved_seq, records, owner):
                if model in self._lines:
                    state.place(self._lines[model], None)
                line = self._lines[model] = state.busy[model] = ModelQueue(model, owner)
                line.adopt(saved_seq, records)
            case events.OpSubmitted(_, operation, owner):
                self._submitted(operation, owner)
            case events.OpRejected(_, operation, reason):
                self._rejected(operation, reason)
            case events.ModelClosed(_, model, reason):
                self._close(model, reason)
            case events.TicketDone() | events.TicketFailed():
                self._reported(event)
            case TimerFired(_, name):
                self._timer(name)
            case _:
                self._of_trainers(event)
        self._recovery.move_away(event.now_s)
        self._dispatch()
        self._watch_gaps(event.now_s)
        return state.out

    def _of_trainers(self, event: events.TrainerEvent) -> None:
        state = self._state
        match event:
            case events.TrainerJoined(_, worker, node):
                self._flights.setdefault(worker, None)
                state.nodes[worker] = node
            case events.TrainerLost(_, worker, reason):
                self._recovery.trainer_lost(worker, reason)
            case events.OpsGated(_, job, nodes):
                self._gate(job, nodes)
            case DispatchDue(now_s, model, settled):
                if settled:
                    self._unsettled.discard(model)
                else:
                    state.out.append(DispatchDue(now_s, model, settled=True))
            case events.StateMoved(_, model, ticket, error):
                self._recovery.moved(model, ticket, error)
            case events.TicketDetached(_, worker, ticket):
                self._recovery.detach(worker, ticket)
            case _:
                assert_never(event)

    def _gate(self, job: JobId, nodes: tuple[NodeId, ...] | None) -> None:
        if nodes is None:
            self._state.gates.pop(job, None)
        else:
            self._state.gates[job] = nodes

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
        return {model: len(line.waiting) for model, line in self._lines.items()}

    def gates(self) -> dict[JobId, tuple[NodeId, ...]]:
        """Where jobs that share nodes may train now."""
        return dict(self._state.gates)

    def at_work(self) -> dict[WorkerId, Flight]:
        """What each busy trainer does."""
        return {worker: flight for worker, flight in self._flights.items() if flight is not None}

    def holders(self) -> dict[ModelId, WorkerId]:
        """Which trainer has the state of which model."""
        held = ((model, line.worker) for model, line in self._lines.items())
        return {model: worker for model, worker in held if worker is not None}

    # ---- arrivals ----
    def _submitted(self, operation: Operation, owner: TenantId) -> None:
        line = self._lines.setdefault(operation.model, ModelQueue(operation.model, owner))
        if line.knows(operation.seq):
            error = f"seq_id {operation.seq} was used up before"
            self._state.fail(operation, error, FaultOwner.USER)
            return
        line.waiting[operation.seq] = operation
        self._state.busy[line.model] = line
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
        state = self._state
        for line in list(state.busy.values()):
            if state.idle(line):
                del state.busy[line.model]
            elif line.has_gap() and line.watched_seq != line.next_seq:
                line.watched_seq = line.next_seq
                at_s = now_s + self._config.give_up_gap_after_s
                state.out.append(SetTimer(f"gap:{line.next_seq}:{line.model}", at_s))

    def _timer(self, name: str) -> None:
        kind, seq, model = name.split(":", 2)
        line = self._lines.get(ModelId(model))
        if kind == "gap" and line is not None and line.next_seq == int(seq) and line.has_gap():
            line.give_up_gap()
        if kind == "move" and line is not None and line.move and line.move.ticket == int(seq):
            self._recovery.moved(line.model, int(seq), "no report came")

    def _close(self, model: ModelId, reason: str) -> None:
        line = self._lines.pop(model, None)
        if line is None:
            return
        self._state.busy.pop(model, None)
        self._last_served.pop(model, None)
        over = {**line.aside, **line.waiting}
        for _, operation in sorted(over.items()):
            self._state.fail(operation, reason, FaultOwner.USER)
        line.waiting.clear()
        line.aside.clear()
        self._state.forget(line)
        self._state.out.append(commands.ForgetStrays(model))

    # ---- dispatch ----
    def _dispatch(self) -> None:
        """Give every idle trainer work: first the owner served longest ago, then its model."""
        for worker in sorted(worker for worker, flight in self._flights.items() if flight is None):
            while self._flights[worker] is None and (line := self._pick(worker)) is not None:
                self._next(worker, line)

    def _pick(self, worker: WorkerId) -> ModelQueue | None:
        state = self._state
        able = [
            line
            for line in state.busy.values()
            if line.has_work()
            and line.move is None
            and line.model not in self._unsettled
            and state.may(line, worker)
            and (line.worker == worker or (line.worker is None and self._least(line, worker)))
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

    def _least(self, line: ModelQueue, worker: WorkerId) -> bool:
        """Whether no trainer that may have the model has fewer."""
        held = self._state.held
        return held[worker] == min(held[one] for one in self._flights if self._state.may(line, one))

    def _next(self, worker: WorkerId, line: ModelQueue) -> None:
        """Bring the state there, bring it up to date, or run the head."""
        ticket = self._state.ticket()
        self._last_served[line.model] = self._last_owned[line.owner] = ticket
        self._state.place(line, worker)
        if line.residency is Residency.ABSENT:
            if line.saved_seq is not None:
                self._recovery.restore(worker, ticket, line, line.saved_seq)
                return
            line.residency = Residency.READY  # nothing saved: the log, or the head, creates it
        if line.applied < len(line.log):
            self._recovery.replay(worker, ticket, line)
            return
        operation = line.head()
        if operation is None or not line.has_work():
            return  # all that it lacked was what is set aside
        if operation.kind is OpKind.OPTIM_STEP and line.poison is not None:
            why = f"{line.poison}; its gradients were dropped, the next optim_step will work again"
            error = f"optim_step seq {operation.seq} was not run: {why}"
            self._state.fail(operation, error, FaultOwner.USER)
            line.fail_head(why)
            return
        order = commands.RunOp(worker, ticket, operation, replay=False)
        self._state.fly(RunHead(ticket, line, operation), order)

    def _snapshot(
        self, worker: WorkerId, line: ModelQueue, op: Operation, *, finishes: bool
    ) -> None:
        """Save the state after `op`; with `finishes` the operation is over only then."""
        ticket = self._state.ticket()
        order = commands.TakeSnapshot(worker, ticket, line.model, op.seq)
        self._state.fly(SnapshotFlight(ticket, line, op, finishes), order)

    # ---- reports ----
    def _reported(self, event: events.TicketDone | events.TicketFailed) -> None:
        """A trainer says how something ended: what it was doing, or a publish that it detached."""
        flight = self._state.land(event.worker, event.ticket)
        if flight is not None:
            if isinstance(event, events.TicketDone):
                self._done(flight, event)
            else:
                self._failed(flight, event)
            return
        published = self._recovery.written(event.worker, event.ticket)
        if published is None:
            return  # about a trainer or a model that is gone
        if isinstance(event, events.TicketDone):
            self._state.complete(published, event.ticket)
        else:
            self._state.fail(published, event.error, event.owner)

    def _done(self, flight: Flight, event: events.TicketDone) -> None:
        match flight:
            case Restore():
                self._recovery.restored(flight, event)
            case Replay():
                self._recovery.replayed(flight, event)
            case RunHead():
                self._ran(flight, event)
            case SnapshotFlight(ticket, line, op, finishes):
                line.snapshot_cost_s = event.elapsed_s
                if finishes:
                    line.finish_head()
                    self._state.complete(op, ticket)
                line.saved(op.seq)
                self._state.out.append(commands.CommitSnapshot(line.model, op.seq))

    def _ran(self, flight: RunHead, event: events.TicketDone) -> None:
        line, op = flight.line, flight.operation
        if op.kind is OpKind.LOAD:  # its source may be deleted: own the state first, then say so
            self._snapshot(event.worker, line, op, finishes=True)
            return
        line.finish_head()
        self._state.complete(op, flight.ticket)
        if op.kind.changes_state:
            line.log_cost_s += event.elapsed_s
        if op.kind is OpKind.OPTIM_STEP and op.job in self._state.gates:
            self._unsettled.add(line.model)
            self._state.out.append(DispatchDue(self._state.now_s, line.model))
        if op.kind is OpKind.OPTIM_STEP and self._snapshot_due(line):
            self._snapshot(event.worker, line, op, finishes=False)

    def _failed(self, flight: Flight, event: events.TicketFailed) -> None:
        state, line = self._state, flight.line
        match flight:
            case Restore() | Replay():
                state.forget(line)
                self._recovery.failed(line, event.error)
            case RunHead(_, _, op):
                line.fail_head(event.error)
                state.fail(op, event.error, event.owner)
                if event.state_lost:
                    state.forget(line)
            case SnapshotFlight(finishes=finishes):
                line.log_cost_s = 0.0  # try again after as much work as before
                if finishes:
                    state.fail(line.fail_head(event.error), event.error, event.owner)
                if event.state_lost or finishes:
                    state.forget(line)

    def _snapshot_due(self, line: ModelQueue) -> bool:
        """Only right after an optim_step, without pending gradients or unwritten publishes."""
        if line.aside:
            return False
        config = self._config
        limit_s = max(config.save_log_after_s, line.snapshot_cost_s / config.snapshot_share)
        return line.log_cost_s >= limit_s

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self._state.check_integrity()
