"""State shared by the parts of the operations controller: models' queues and trainers' flights:
what each trainer does now, and the publishes that it writes beside them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from slackwater.control.operations import commands
from slackwater.control.operations.facts import OpEnded
from slackwater.control.operations.model_queue import LogEntry, ModelQueue
from slackwater.control.operations.settings import OperationsConfig
from slackwater.model.ids import JobId, ModelId, NodeId, WorkerId
from slackwater.model.operation import FaultOwner, Operation
from slackwater.model.placement import is_within


@dataclass(frozen=True, slots=True)
class Restore:
    """The trainer loads the saved state."""

    ticket: int
    queue: ModelQueue


@dataclass(frozen=True, slots=True)
class Replay:
    """The trainer applies an entry of the log to the state."""

    ticket: int
    queue: ModelQueue
    entry: LogEntry


@dataclass(frozen=True, slots=True)
class RunHead:
    """The trainer runs the head of the queue."""

    ticket: int
    queue: ModelQueue
    operation: Operation


@dataclass(frozen=True, slots=True)
class SnapshotFlight:
    """The trainer saves the state after an operation, which ends only then if `finishes`."""

    ticket: int
    queue: ModelQueue
    operation: Operation
    finishes: bool


Flight: TypeAlias = Restore | Replay | RunHead | SnapshotFlight


def runs_head(flight: Flight) -> bool:
    """Whether the end of the flight ends the head of the queue."""
    return isinstance(flight, RunHead) or (isinstance(flight, SnapshotFlight) and flight.finishes)


@dataclass(frozen=True, slots=True)
class DetachedPublish:
    """A publish that a trainer writes during its next operations."""

    worker: WorkerId
    queue: ModelQueue
    operation: Operation


@dataclass(slots=True)
class OperationsState:
    """The controller's state, and the commands that answer the current event."""

    config: OperationsConfig
    queues: dict[ModelId, ModelQueue] = field(default_factory=dict)
    flights: dict[WorkerId, Flight | None] = field(default_factory=dict)  # of every trainer
    nodes: dict[WorkerId, NodeId | None] = field(default_factory=dict)
    gates: dict[JobId, tuple[NodeId, ...]] = field(default_factory=dict)
    # Models with operations, and some without.
    busy: dict[ModelId, ModelQueue] = field(default_factory=dict)
    model_counts: Counter[WorkerId] = field(default_factory=Counter)  # of each trainer
    tickets: int = 0
    now_s: float = 0.0
    out: list[commands.Command] = field(default_factory=list)

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    # ---- trainers ----
    def start_flight(self, flight: Flight, order: commands.TrainerOrder) -> None:
        """Send an order once the trainer has its devices; the model's job is charged for them."""
        assert self.flights[order.worker] is None
        self.flights[order.worker] = flight
        self.out.append(commands.StartWork(self.now_s, order.worker, flight.queue.job, order))

    def end_flight(self, worker: WorkerId, ticket: int) -> Flight | None:
        """End and return the flight that a report is about; None if the report is stale."""
        flight = self.flights.get(worker)
        if flight is None or flight.ticket != ticket:
            return None
        self.flights[worker] = None
        return flight if flight.queue.model in self.queues else None

    def may_run(self, queue: ModelQueue, worker: WorkerId) -> bool:
        """Whether the head may run there: passes and steps of a gated job need its permit."""
        head = queue.head()
        if not self.gates or head is None or not head.kind.needs_permit:
            return True
        nodes, place = self.gates.get(head.job), self.nodes.get(worker)
        if nodes is None:
            return True
        return place is not None and any(is_within(place, node) for node in nodes)

    def assign(self, queue: ModelQueue, worker: WorkerId | None) -> None:
        """Assign the model to a trainer; None: to no trainer."""
        if queue.worker is not None:
            self.model_counts[queue.worker] -= 1
        if worker is None:
            queue.lose_state()
        else:
            self.model_counts[worker] += 1
            queue.worker = worker

    def forget(self, queue: ModelQueue) -> None:
        """Drop the state on its trainer: it is no longer needed or trusted."""
        if queue.worker is not None:
            self.out.append(commands.DropModel(queue.worker, queue.model))
        self.assign(queue, None)

    def idle(self, queue: ModelQueue) -> bool:
        """Whether the model has no operations; those that have some are in `busy`."""
        return not (queue.waiting or queue.detached)

    # ---- ends ----
    def fail(self, operation: Operation, error: str, owner: FaultOwner) -> None:
        self.out.append(commands.FailOp(operation.request, error, owner))
        self._report_end(operation, done=False)

    def complete(self, operation: Operation, ticket: int) -> None:
        """The operation ended with the result of the ticket."""
        self.out.append(commands.CompleteOp(operation.request, ticket))
        self._report_end(operation, done=True)

    def _report_end(self, operation: Operation, *, done: bool) -> None:
        ended = OpEnded(self.now_s, operation.job, operation.request, operation.kind, done)
        self.out.append(ended)

    def check_integrity(self) -> None:
        tickets = [flight.ticket for flight in self.flights.values() if flight is not None]
        assert len(tickets) == len(set(tickets))
        for model, queue in self.queues.items():
            assert queue.model == model
            queue.check_integrity()
            assert queue.worker is None or queue.worker in self.flights, "state on a lost trainer"
            assert self.idle(queue) or self.busy.get(model) is queue, (
                "a model with operations is not in `busy`"
            )
        model_counts = Counter(
            queue.worker for queue in self.queues.values() if queue.worker is not None
        )
        assert +self.model_counts == model_counts, "trainers' models are counted wrong"
