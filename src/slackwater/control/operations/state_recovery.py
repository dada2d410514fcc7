"""How a model's state comes to a trainer: restored and replayed, or moved from another node.

When a trainer is lost, its models come back elsewhere from the last saved state by replaying the
log. A model whose permit is for another node moves there with its state; where that fails, it comes
back as from a lost trainer. A publish that a trainer had detached is written again by a replay.
"""

from slackwater.control.operations import commands, events
from slackwater.control.operations.facts import PublishDetached
from slackwater.control.operations.flights import DetachedPublish, Replay, Restore, runs_head
from slackwater.control.operations.model_queue import ModelQueue, Residency, StateTransfer
from slackwater.control.operations.operations_state import OperationsState
from slackwater.control.timer import SetTimer
from slackwater.model.ids import ModelId, WorkerId
from slackwater.model.operation import FaultOwner, Operation, OpKind


class StateRecovery:
    def __init__(self, state: OperationsState) -> None:
        self._state = state
        self._detached: dict[int, DetachedPublish] = {}

    # ---- restore and replay ----
    def restore(self, worker: WorkerId, ticket: int, line: ModelQueue, seq: int) -> None:
        """Load the state that was saved after `seq`, or a later one that the node kept."""
        order = commands.RestoreState(worker, ticket, line.model, seq, line.usable_state())
        self._state.fly(Restore(ticket, line), order)

    def replay(self, worker: WorkerId, ticket: int, line: ModelQueue) -> None:
        """Bring the effect of the next entry of the log to the state."""
        entry = line.log[line.applied]
        replayed = entry.operation
        order: commands.TrainerOrder = commands.DropGradients(
            worker, ticket, line.model, replayed.seq
        )
        if entry.ran:
            usable = line.usable_state() if replayed.kind is OpKind.CREATE else -1
            order = commands.RunOp(worker, ticket, replayed, replay=True, at_most=usable)
        self._state.fly(Replay(ticket, line, entry), order)

    def restored(self, flight: Restore, event: events.TicketDone) -> None:
        """The trainer has the state that the log starts from."""
        line = flight.line
        line.residency = Residency.READY
        if event.reached is not None:
            line.caught_up(event.reached)
        self._state.out.append(commands.ForgetStrays(line.model))

    def replayed(self, flight: Replay, event: events.TicketDone) -> None:
        """The trainer has the effect of one more entry."""
        state, line, entry = self._state, flight.line, flight.entry
        if entry not in line.log:
            return  # written meanwhile, by the trainer that had it before
        line.applied += 1
        if event.reached is not None:
            line.caught_up(event.reached)
        if entry.operation.kind is OpKind.CREATE:
            state.out.append(commands.ForgetStrays(line.model))
        if entry.operation.seq in line.aside:  # written at last
            line.finish_aside(entry.operation)
            state.complete(entry.operation, event.ticket)
        if line.applied > line.furthest_applied:
            line.furthest_applied, line.failed_restores = line.applied, 0

    def failed(self, line: ModelQueue, why: str) -> None:
        """Try again; after too many failures at the same place, fail what waits and say why."""
        state = self._state
        line.failed_restores += 1
        if line.failed_restores < state.config.max_attempts:
            return
        line.failed_restores = 0
        for unwritten in list(line.aside.values()):
            error = f"version of seq {unwritten.seq} cannot be written: {why}"
            state.fail(unwritten, error, FaultOwner.SERVER)
            line.finish_aside(unwritten)
        while (operation := line.head()) is not None:
            error = f"model {line.model} cannot be brought back: {why}"
            state.fail(operation, error, FaultOwner.SERVER)
            line.fail_head(why)

    def trainer_lost(self, worker: WorkerId, reason: str) -> None:
        """Its models have no state any more; what it was writing or doing is tried elsewhere."""
        state = self._state
        flight = state.flights.pop(worker, None)
        state.nodes.pop(worker, None)
        for line in state.lines.values():
            if line.worker == worker:
                state.place(line, None)
        for ticket in [t for t, publish in self._detached.items() if publish.worker == worker]:
            unwritten = self._detached.pop(ticket).line
            if unwritten.model in state.lines:
                self.failed(unwritten, f"trainer lost: {reason}")
        if flight is None or flight.line.model not in state.lines:
            return
        line = flight.line
        if isinstance(flight, Restore | Replay):
            self.failed(line, f"trainer lost: {reason}")
        if not runs_head(flight):
            return
        line.attempts += 1
        if line.attempts >= state.config.max_attempts:
            why = f"the trainer was lost {line.attempts} times while running it: {reason}"
            state.fail(line.fail_head(why), why, FaultOwner.SERVER)

    # ---- detached publishes ----
    def detach(self, worker: WorkerId, ticket: int) -> None:
        """The trainer is free for what comes next; the publish is over when its writing is."""
        state = self._state
        flight = state.flights.get(worker)
        if flight is None or flight.ticket != ticket:
            return
        line = flight.line
        if line.model not in state.lines:
            state.flights[worker] = None
            return
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
                state.flights[worker] = None  # written meanwhile, by the trainer that had it before
                return
            if operation.seq not in line.aside:
                return
            line.applied += 1
        assert operation is not None
        state.flights[worker] = None
        self._detached[ticket] = DetachedPublish(worker, line, operation)
        state.out.append(PublishDetached(state.now_s, operation.job, operation.request))

    def written(self, worker: WorkerId, ticket: int) -> Operation | None:
        """The detached publish that a report is about, which is over now."""
        publish = self._detached.get(ticket)
        if publish is None or publish.worker != worker:
            return None
        del self._detached[ticket]
        line, operation = publish.line, publish.operation
        if self._state.lines.get(line.model) is not line or operation.seq not in line.aside:
            return None
        line.finish_aside(operation)
        return operation

    # ---- moves ----
    def move_away(self, now_s: float) -> None:
        """A state that waits where its permit is not goes to a trainer that has it."""
        state = self._state
        if not state.gates:
            return
        busy = {id(flight.line) for flight in state.flights.values() if flight is not None}
        for line in state.busy.values():
            if line.worker is None or line.move or id(line) in busy:
                continue
            if state.may(line, line.worker):
                continue
            able = [worker for worker in sorted(state.flights) if state.may(line, worker)]
            if not able:
                continue  # a closed gate, or nobody there yet
            if line.usable_state() < 0 or line.residency is Residency.ABSENT:
                state.forget(line)  # it must be made from the log anyhow
                continue
            to = min(able, key=lambda worker: (state.held[worker], worker))
            line.move = StateTransfer(state.ticket(), to)
            state.out.append(commands.MoveState(line.worker, line.move.ticket, line.model, to))
            at_s = now_s + state.config.give_up_move_after_s
            state.out.append(SetTimer(f"move:{line.move.ticket}:{line.model}", at_s))

    def moved(self, model: ModelId, ticket: int, error: str) -> None:
        """The trainer there finds the state when it restores the model; after an error, none."""
        state = self._state
        line = state.lines.get(model)
        move = None if line is None else line.move
        if line is None or move is None or move.ticket != ticket:
            state.out.append(commands.ForgetStrays(model))  # it came too late
            return
        state.forget(line)
        if not error and move.to in state.flights:
            state.place(line, move.to)
