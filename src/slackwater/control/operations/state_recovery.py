"""Brings a model's state to a trainer: by restore and replay, or by a move from another node.

When a trainer is lost, its models are restored elsewhere from the last saved state, and the log is
replayed. A model whose permit is for another node moves there with its state; if the move fails, it
is restored like that of a lost trainer. A replay writes unwritten detached publishes again.
"""

from slackwater.control.operations import commands, events
from slackwater.control.operations.facts import PublishDetached
from slackwater.control.operations.model_queue import ModelQueue, StateTransfer
from slackwater.control.operations.operations_state import (
    DetachedPublish,
    OperationsState,
    Replay,
    Restore,
    runs_head,
)
from slackwater.control.timer import SetTimer
from slackwater.model.ids import ModelId, WorkerId
from slackwater.model.operation import FaultOwner, Operation, OpKind


class StateRecovery:
    """Restores, replays, detached publishes and moves."""

    def __init__(self, state: OperationsState) -> None:
        self._state = state
        self._detached: dict[int, DetachedPublish] = {}

    # ---- restore and replay ----
    def restore(self, worker: WorkerId, ticket: int, queue: ModelQueue, seq: int) -> None:
        """Load the state that was saved after `seq`, or a later one that the node kept."""
        order = commands.RestoreModel(worker, ticket, queue.model, seq, queue.max_usable_seq())
        self._state.start_flight(Restore(ticket, queue), order)

    def replay(self, worker: WorkerId, ticket: int, queue: ModelQueue) -> None:
        """Apply the next entry of the log to the state."""
        entry = queue.log[queue.applied]
        replayed = entry.operation
        order: commands.TrainerOrder = commands.DiscardGradients(
            worker, ticket, queue.model, replayed.seq
        )
        if entry.ran:
            usable = queue.max_usable_seq() if replayed.kind is OpKind.CREATE else -1
            order = commands.RunOp(worker, ticket, replayed, replay=True, at_most=usable)
        self._state.start_flight(Replay(ticket, queue, entry), order)

    def finish_restore(self, flight: Restore, event: events.TicketDone) -> None:
        """The trainer has the state from which the log starts."""
        queue = flight.queue
        queue.has_state = True
        if event.reached is not None:
            queue.mark_applied(event.reached)
        self._state.out.append(commands.ForgetStrays(queue.model))

    def finish_replay(self, flight: Replay, event: events.TicketDone) -> None:
        """The trainer has applied one more entry."""
        state, queue, entry = self._state, flight.queue, flight.entry
        if entry not in queue.log:
            return  # its former trainer wrote it meanwhile
        queue.applied += 1
        if event.reached is not None:
            queue.mark_applied(event.reached)
        if entry.operation.kind is OpKind.CREATE:
            state.out.append(commands.ForgetStrays(queue.model))
        if entry.operation.seq in queue.detached:  # a replay has written it
            queue.finish_detached(entry.operation)
            state.complete(entry.operation, event.ticket)
        if queue.applied > queue.furthest_applied:
            queue.furthest_applied, queue.failed_restores = queue.applied, 0

    def count_failure(self, queue: ModelQueue, why: str) -> None:
        """Count a failed restore. After too many without progress, fail the waiting operations."""
        state = self._state
        queue.failed_restores += 1
        if queue.failed_restores < state.config.max_attempts:
            return
        queue.failed_restores = 0
        for unwritten in list(queue.detached.values()):
            error = f"version of seq {unwritten.seq} cannot be written: {why}"
            state.fail(unwritten, error, FaultOwner.SERVER)
            queue.finish_detached(unwritten)
        while (operation := queue.head()) is not None:
            error = f"model {queue.model} cannot be restored: {why}"
            state.fail(operation, error, FaultOwner.SERVER)
            queue.fail_head(why)

    def trainer_lost(self, worker: WorkerId, reason: str) -> None:
        """A trainer was lost: its models lose their state, and its work is retried elsewhere."""
        state = self._state
        flight = state.flights.pop(worker, None)
        state.nodes.pop(worker, None)
        for queue in state.queues.values():
            if queue.worker == worker:
                state.assign(queue, None)
        for ticket in [t for t, publish in self._detached.items() if publish.worker == worker]:
            unwritten = self._detached.pop(ticket).queue
            if unwritten.model in state.queues:
                self.count_failure(unwritten, f"trainer lost: {reason}")
        if flight is None or flight.queue.model not in state.queues:
            return
        queue = flight.queue
        if isinstance(flight, Restore | Replay):
            self.count_failure(queue, f"trainer lost: {reason}")
        if not runs_head(flight):
            return
        queue.attempts += 1
        if queue.attempts >= state.config.max_attempts:
            why = f"the trainer was lost {queue.attempts} times while running it: {reason}"
            state.fail(queue.fail_head(why), why, FaultOwner.SERVER)

    # ---- detached publishes ----
    def detach(self, worker: WorkerId, ticket: int) -> None:
        """Free the trainer from a publish, which ends when its copy is written."""
        state = self._state
        flight = state.flights.get(worker)
        if flight is None or flight.ticket != ticket:
            return
        queue = flight.queue
        if queue.model not in state.queues:
            state.flights[worker] = None
            return
        if runs_head(flight):
            head = queue.head()
            if head is None or head.kind is not OpKind.PUBLISH:
                return  # only a publish leaves the state unchanged
            operation: Operation | None = queue.detach_head()
            queue.skip_refused()
        else:
            operation = flight.entry.operation if isinstance(flight, Replay) else None
            entry = queue.log[queue.applied] if queue.applied < len(queue.log) else None
            if entry is None or entry.operation is not operation:
                state.flights[worker] = None  # its former trainer wrote it meanwhile
                return
            if operation.seq not in queue.detached:
                return
            queue.applied += 1
        assert operation is not None
        state.flights[worker] = None
        self._detached[ticket] = DetachedPublish(worker, queue, operation)
        state.out.append(PublishDetached(state.now_s, operation.job, operation.request))

    def finish_publish(self, worker: WorkerId, ticket: int) -> Operation | None:
        """End and return the detached publish that a report is about, if any."""
        publish = self._detached.get(ticket)
        if publish is None or publish.worker != worker:
            return None
        del self._detached[ticket]
        queue, operation = publish.queue, publish.operation
        if self._state.queues.get(queue.model) is not queue or operation.seq not in queue.detached:
            return None
        queue.finish_detached(operation)
        return operation

    # ---- moves ----
    def move_states(self, now_s: float) -> None:
        """Move states whose next operation has a permit for other nodes only."""
        state = self._state
        if not state.gates:
            return
        busy = {id(flight.queue) for flight in state.flights.values() if flight is not None}
        for queue in state.busy.values():
            if queue.worker is None or queue.move or id(queue) in busy:
                continue
            if state.may_run(queue, queue.worker):
                continue
            able = [worker for worker in sorted(state.flights) if state.may_run(queue, worker)]
            if not able:
                continue  # the gate is closed, or no trainer is there yet
            if queue.max_usable_seq() < 0 or not queue.has_state:
                state.forget(queue)  # it must be rebuilt from the log anyway
                continue
            to = min(able, key=lambda worker: (state.model_counts[worker], worker))
            queue.move = StateTransfer(state.ticket(), to)
            state.out.append(commands.MoveState(queue.worker, queue.move.ticket, queue.model, to))
            at_s = now_s + state.config.give_up_move_after_s
            state.out.append(SetTimer(f"move:{queue.move.ticket}:{queue.model}", at_s))

    def finish_move(self, model: ModelId, ticket: int, error: str) -> None:
        """A move ended. Without an error the new trainer finds the state when it restores."""
        state = self._state
        queue = state.queues.get(model)
        move = None if queue is None else queue.move
        if queue is None or move is None or move.ticket != ticket:
            state.out.append(commands.ForgetStrays(model))  # the report came too late
            return
        state.forget(queue)
        if not error and move.to in state.flights:
            state.assign(queue, move.to)
