"""The operations controller: which trainer runs which operation, and when (PlexRL 4.2).

Invariants: a model's operations run in order; a trainer does one thing at a time; a model's state
is used only if it is the saved state plus the whole log, applied in order; a request ends exactly
once. `state_recovery.py` brings a model's state to a trainer.

An order leaves through `DeviceOwnership`, when its trainer has its devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from slackwater.control.devices.messages import DeviceCommand, DeviceEvent, GrantDevices
from slackwater.control.jobs.events import JobTrained
from slackwater.control.operations import commands, events
from slackwater.control.operations.facts import DispatchDue, OpEnded
from slackwater.control.operations.model_queue import ModelQueue
from slackwater.control.operations.operations_state import (
    Flight,
    OperationsState,
    Replay,
    Restore,
    RunHead,
    SnapshotFlight,
)
from slackwater.control.operations.settings import OperationsConfig
from slackwater.control.operations.state_recovery import StateRecovery
from slackwater.control.steps.events import DevicesAsked, DevicesGranted, DevicesReturned
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import JobId, ModelId, NodeId, RequestId, TenantId, WorkerId
from slackwater.model.operation import FaultOwner, Operation, OpKind

OPERATIONS = ("gap:", "move:")  # prefixes of its timers' names


class OperationsController:
    """A state machine without I/O over all models and trainers."""

    def __init__(self, config: OperationsConfig | None = None) -> None:
        self._config = config or OperationsConfig()
        self._state = OperationsState(self._config)
        self._queues, self._flights = self._state.queues, self._state.flights
        self._recovery = StateRecovery(self._state)
        self._unsettled: set[ModelId] = set()  # after an optim_step, until its gate is known
        self._last_served: dict[ModelId, int] = {}
        self._last_owned: dict[TenantId, int] = {}

    def handle(self, event: events.Event) -> Sequence[commands.Command]:
        """Take one event, return commands in order."""
        state = self._state
        state.out, state.now_s = [], event.now_s
        match event:
            case events.ModelAdopted(_, model, saved_seq, records, owner):
                if model in self._queues:
                    state.assign(self._queues[model], None)
                queue = self._queues[model] = state.busy[model] = ModelQueue(model, owner)
                queue.adopt(saved_seq, records)
            case events.OpSubmitted(_, operation, owner):
                self._submit(operation, owner)
            case events.OpRejected(_, operation, reason):
                self._reject(operation, reason)
            case events.ModelClosed(_, model, reason):
                self._close(model, reason)
            case events.TicketDone() | events.TicketFailed():
                self._handle_report(event)
            case TimerFired(_, name):
                self._timer(name)
            case _:
                self._handle_trainer_event(event)
        self._recovery.move_states(event.now_s)
        self._dispatch()
        self._watch_gaps(event.now_s)
        return state.out

    def _handle_trainer_event(self, event: events.TrainerEvent) -> None:
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
                self._recovery.finish_move(model, ticket, error)
            case events.TicketDetached(_, worker, ticket):
                self._recovery.detach(worker, ticket)
            case _:
                assert_never(event)

    def _gate(self, job: JobId, nodes: tuple[NodeId, ...] | None) -> None:
        if nodes is None:
            self._state.gates.pop(job, None)
        else:
            self._state.gates[job] = nodes

    # ---- queries ----
    def check_number(self, model: ModelId, seq: int) -> None:
        """Raise if `seq` is too far ahead of the model's next number."""
        queue = self._queues.get(model) or ModelQueue(model)
        last = queue.next_seq + self._config.max_skipped
        if seq > last and not queue.has_seq(seq):
            raise ConfigError.of(
                "seq_id", seq, f"must be at most {last}: the next one is {queue.next_seq}"
            )

    def check_room(self, model: ModelId) -> None:
        """Raise if too many operations of a model wait."""
        queue = self._queues.get(model)
        if queue is not None and len(queue.waiting) >= self._config.max_waiting_per_model:
            raise UnavailableError(
                f"model {model}: {len(queue.waiting)} operations are waiting; retry later"
            )

    def waiting(self) -> dict[ModelId, int]:
        return {model: len(queue.waiting) for model, queue in self._queues.items()}

    def gates(self) -> dict[JobId, tuple[NodeId, ...]]:
        """The nodes where jobs that share nodes may train now."""
        return dict(self._state.gates)

    def busy_trainers(self) -> dict[WorkerId, Flight]:
        """The flights of busy trainers."""
        return {worker: flight for worker, flight in self._flights.items() if flight is not None}

    def holders(self) -> dict[ModelId, WorkerId]:
        """Trainers by the models whose state they have."""
        held = ((model, queue.worker) for model, queue in self._queues.items())
        return {model: worker for model, worker in held if worker is not None}

    # ---- arrivals ----
    def _submit(self, operation: Operation, owner: TenantId) -> None:
        queue = self._queues.setdefault(operation.model, ModelQueue(operation.model, owner))
        if queue.has_seq(operation.seq):
            error = f"seq_id {operation.seq} was used before"
            self._state.fail(operation, error, FaultOwner.USER)
            return
        queue.waiting[operation.seq] = operation
        self._state.busy[queue.model] = queue
        queue.job = operation.job or queue.job
        queue.skip_refused()

    def _reject(self, operation: Operation, reason: str) -> None:
        queue = self._queues.get(operation.model)
        if queue is None or queue.has_seq(operation.seq):
            return
        queue.refused[operation.seq] = (operation, reason)
        queue.skip_refused()

    def _watch_gaps(self, now_s: float) -> None:
        """Set a timer for every missing number that is next, whatever event made it so."""
        state = self._state
        for queue in list(state.busy.values()):
            if state.idle(queue):
                del state.busy[queue.model]
            elif queue.has_gap() and queue.watched_seq != queue.next_seq:
                queue.watched_seq = queue.next_seq
                at_s = now_s + self._config.give_up_gap_after_s
                state.out.append(SetTimer(f"gap:{queue.next_seq}:{queue.model}", at_s))

    def _timer(self, name: str) -> None:
        kind, seq, model = name.split(":", 2)
        queue = self._queues.get(ModelId(model))
        if kind == "gap" and queue is not None and queue.next_seq == int(seq) and queue.has_gap():
            queue.give_up_gap()
        if kind == "move" and queue is not None and queue.move and queue.move.ticket == int(seq):
            self._recovery.finish_move(queue.model, int(seq), "no report came")

    def _close(self, model: ModelId, reason: str) -> None:
        queue = self._queues.pop(model, None)
        if queue is None:
            return
        self._state.busy.pop(model, None)
        self._last_served.pop(model, None)
        over = {**queue.detached, **queue.waiting}
        for _, operation in sorted(over.items()):
            self._state.fail(operation, reason, FaultOwner.USER)
        queue.waiting.clear()
        queue.detached.clear()
        self._state.forget(queue)
        self._state.out.append(commands.ForgetStrays(model))

    # ---- dispatch ----
    def _dispatch(self) -> None:
        """Give idle trainers work: of the owner, then of the model, that was served longest ago."""
        for worker in sorted(worker for worker, flight in self._flights.items() if flight is None):
            while self._flights[worker] is None and (queue := self._pick(worker)) is not None:
                self._start_next(worker, queue)

    def _pick(self, worker: WorkerId) -> ModelQueue | None:
        state = self._state
        able = [
            queue
            for queue in state.busy.values()
            if queue.has_work()
            and queue.move is None
            and queue.model not in self._unsettled
            and state.may_run(queue, worker)
            and (
                queue.worker == worker
                or (queue.worker is None and self._has_fewest_models(queue, worker))
            )
        ]
        return min(
            able,
            key=lambda queue: (
                self._last_owned.get(queue.owner, 0),
                self._last_served.get(queue.model, 0),
                queue.model,
            ),
            default=None,
        )

    def _has_fewest_models(self, queue: ModelQueue, worker: WorkerId) -> bool:
        """Whether no trainer that may run the model has fewer models."""
        held = self._state.model_counts
        return held[worker] == min(
            held[one] for one in self._flights if self._state.may_run(queue, one)
        )

    def _start_next(self, worker: WorkerId, queue: ModelQueue) -> None:
        """Restore the model's state on the trainer, replay its log there, or run its head."""
        ticket = self._state.ticket()
        self._last_served[queue.model] = self._last_owned[queue.owner] = ticket
        self._state.assign(queue, worker)
        if not queue.has_state:
            if queue.saved_seq is not None:
                self._recovery.restore(worker, ticket, queue, queue.saved_seq)
                return
            # Nothing is saved: the log or the head creates the state.
            queue.has_state = True
        if queue.applied < len(queue.log):
            self._recovery.replay(worker, ticket, queue)
            return
        operation = queue.head()
        if operation is None or not queue.has_work():
            return  # it only had detached publishes to write again
        if operation.kind is OpKind.OPTIM_STEP and queue.poison is not None:
            why = f"{queue.poison}; its gradients were dropped; the next optim_step will work again"
            error = f"optim_step seq {operation.seq} was not run: {why}"
            self._state.fail(operation, error, FaultOwner.USER)
            queue.fail_head(why)
            return
        order = commands.RunOp(worker, ticket, operation, replay=False)
        self._state.start_flight(RunHead(ticket, queue, operation), order)

    def _snapshot(
        self, worker: WorkerId, queue: ModelQueue, op: Operation, *, finishes: bool
    ) -> None:
        """Save the state after `op`; with `finishes` the operation ends only then."""
        ticket = self._state.ticket()
        order = commands.SaveState(worker, ticket, queue.model, op.seq)
        self._state.start_flight(SnapshotFlight(ticket, queue, op, finishes), order)

    # ---- reports ----
    def _handle_report(self, event: events.TicketDone | events.TicketFailed) -> None:
        """A trainer reports the end of its flight, or of a publish that it detached."""
        flight = self._state.end_flight(event.worker, event.ticket)
        if flight is not None:
            if isinstance(event, events.TicketDone):
                self._finish_flight(flight, event)
            else:
                self._fail_flight(flight, event)
            return
        published = self._recovery.finish_publish(event.worker, event.ticket)
        if published is None:
            return  # the report is about a lost trainer or a closed model
        if isinstance(event, events.TicketDone):
            self._state.complete(published, event.ticket)
        else:
            self._state.fail(published, event.error, event.owner)

    def _finish_flight(self, flight: Flight, event: events.TicketDone) -> None:
        match flight:
            case Restore():
                self._recovery.finish_restore(flight, event)
            case Replay():
                self._recovery.finish_replay(flight, event)
            case RunHead():
                self._finish_run(flight, event)
            case SnapshotFlight(ticket, queue, op, finishes):
                queue.snapshot_cost_s = event.elapsed_s
                if finishes:
                    queue.finish_head()
                    self._state.complete(op, ticket)
                queue.mark_saved(op.seq)
                self._state.out.append(commands.CommitSnapshot(queue.model, op.seq))

    def _finish_run(self, flight: RunHead, event: events.TicketDone) -> None:
        queue, op = flight.queue, flight.operation
        if op.kind is OpKind.LOAD:  # its source may be deleted: save the state before the load ends
            self._snapshot(event.worker, queue, op, finishes=True)
            return
        queue.finish_head()
        self._state.complete(op, flight.ticket)
        if op.kind.changes_state:
            queue.log_cost_s += event.elapsed_s
        if op.kind is OpKind.OPTIM_STEP and op.job in self._state.gates:
            self._unsettled.add(queue.model)
            self._state.out.append(DispatchDue(self._state.now_s, queue.model))
        if op.kind is OpKind.OPTIM_STEP and self._snapshot_due(queue):
            self._snapshot(event.worker, queue, op, finishes=False)

    def _fail_flight(self, flight: Flight, event: events.TicketFailed) -> None:
        state, queue = self._state, flight.queue
        match flight:
            case Restore() | Replay():
                state.forget(queue)
                self._recovery.count_failure(queue, event.error)
            case RunHead(_, _, op):
                queue.fail_head(event.error)
                state.fail(op, event.error, event.owner)
                if event.state_lost:
                    state.forget(queue)
            case SnapshotFlight(finishes=finishes):
                queue.log_cost_s = 0.0  # try again after as much work as before
                if finishes:
                    state.fail(queue.fail_head(event.error), event.error, event.owner)
                if event.state_lost or finishes:
                    state.forget(queue)

    def _snapshot_due(self, queue: ModelQueue) -> bool:
        """Whether to save now, right after an optim_step; not while publishes are unwritten."""
        if queue.detached:
            return False
        config = self._config
        limit_s = max(config.save_log_after_s, queue.snapshot_cost_s / config.snapshot_share)
        return queue.log_cost_s >= limit_s

    def check_integrity(self) -> None:
        self._state.check_integrity()


@dataclass(frozen=True, slots=True)
class _RunningWork:
    """What a trainer does with its devices; an optimizer step `ends_step`."""

    ticket: int
    job: JobId | None
    waited_s: float
    ends_step: bool


class DeviceOwnership:
    """Holds a trainer's order back until the step tracker has granted its devices, and charges the
    time for which the trainer has them to its job.
    """

    def __init__(self) -> None:
        self._waiting: dict[WorkerId, commands.StartWork] = {}
        self._running: dict[WorkerId, _RunningWork] = {}
        self._submitted_s: dict[RequestId, float] = {}

    def handle(self, event: DeviceEvent) -> Sequence[DeviceCommand]:
        """Take one event; return what follows, in order."""
        match event:
            case events.OpSubmitted(now_s, operation):
                self._submitted_s[operation.request] = now_s
            case OpEnded(_, _, request):
                self._submitted_s.pop(request, None)
            case commands.StartWork(now_s, worker, job):
                self._waiting[worker] = event
                return (DevicesAsked(now_s, worker, job),)
            case DevicesGranted(now_s, trainer):
                return (self._start(trainer, now_s),)
            case events.TrainerLost(_, worker):
                self._waiting.pop(worker, None)
                self._running.pop(worker, None)
            case _:
                return self._finish(event)
        return ()

    def holders(self) -> dict[WorkerId, JobId | None]:
        """The trainers with an order, and the jobs that it is for."""
        return {worker: work.job for worker, work in self._running.items()}

    def _start(self, trainer: WorkerId, now_s: float) -> DeviceCommand:
        work = self._waiting.pop(trainer, None)
        if work is None:
            return GrantDevices(trainer)
        order = work.order
        since_s, ends_step = now_s, False
        if isinstance(order, commands.RunOp):
            since_s = self._submitted_s.pop(order.operation.request, now_s)
            ends_step = order.operation.kind is OpKind.OPTIM_STEP and not order.replay
        running = _RunningWork(order.ticket, work.job, now_s - since_s, ends_step)
        self._running[trainer] = running
        return order

    def _finish(
        self, event: events.TicketDetached | events.TicketDone | events.TicketFailed
    ) -> Sequence[DeviceCommand]:
        """Return the devices, unless the report is on other work than they were granted for."""
        now_s, work = event.now_s, self._running.get(event.worker)
        if work is None or work.ticket != event.ticket:
            return ()
        del self._running[event.worker]
        elapsed_s = 0.0 if isinstance(event, events.TicketFailed) else event.elapsed_s
        ends_step = work.ends_step and isinstance(event, events.TicketDone)
        returned = DevicesReturned(now_s, event.worker, elapsed_s, ends_step)
        if work.job is None:
            return (returned,)
        return JobTrained(now_s, work.job, elapsed_s, work.waited_s, ends_step), returned

    def check_integrity(self) -> None:
        both = self._waiting.keys() & self._running.keys()
        assert not both, f"{both} have an order and wait for another"
