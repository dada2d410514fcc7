"""What the parts of the operations controller share: models' lines, trainers, and what they do."""

from collections import Counter
from dataclasses import dataclass, field

from slackwater.control.operations import commands
from slackwater.control.operations.facts import OpOver
from slackwater.control.operations.flights import Flight
from slackwater.control.operations.model_queue import ModelQueue
from slackwater.control.operations.settings import OperationsConfig
from slackwater.model.ids import JobId, ModelId, NodeId, WorkerId
from slackwater.model.operation import FaultOwner, Operation
from slackwater.model.placement import is_within


@dataclass(slots=True)
class OperationsState:
    """The controller's state, and the commands of the event in hand."""

    config: OperationsConfig
    lines: dict[ModelId, ModelQueue] = field(default_factory=dict)
    flights: dict[WorkerId, Flight | None] = field(default_factory=dict)  # of every trainer
    nodes: dict[WorkerId, NodeId | None] = field(default_factory=dict)
    gates: dict[JobId, tuple[NodeId, ...]] = field(default_factory=dict)
    busy: dict[ModelId, ModelQueue] = field(default_factory=dict)  # all with operations, and others
    held: Counter[WorkerId] = field(default_factory=Counter)  # how many models each trainer has
    tickets: int = 0
    now_s: float = 0.0
    out: list[commands.Command] = field(default_factory=list)

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    # ---- trainers ----
    def fly(self, flight: Flight, order: commands.TrainerOrder) -> None:
        """Send an order once the trainer has its devices, on the account of the model's job."""
        assert self.flights[order.worker] is None
        self.flights[order.worker] = flight
        self.out.append(commands.StartWork(self.now_s, order.worker, flight.line.job, order))

    def land(self, worker: WorkerId, ticket: int) -> Flight | None:
        """The flight that a report is about; stale reports are about none."""
        flight = self.flights.get(worker)
        if flight is None or flight.ticket != ticket:
            return None
        self.flights[worker] = None
        return flight if flight.line.model in self.lines else None

    def may(self, line: ModelQueue, worker: WorkerId) -> bool:
        """Whether the head may run there: passes and steps of a gated job need its permit."""
        head = line.head()
        if not self.gates or head is None or not head.kind.needs_permit:
            return True
        nodes, place = self.gates.get(head.job), self.nodes.get(worker)
        if nodes is None:
            return True
        return place is not None and any(is_within(place, node) for node in nodes)

    def place(self, line: ModelQueue, worker: WorkerId | None) -> None:
        """The trainer has the model from now on; None: no trainer has."""
        if line.worker is not None:
            self.held[line.worker] -= 1
        if worker is None:
            line.lose_state()
        else:
            self.held[worker] += 1
            line.worker = worker

    def forget(self, line: ModelQueue) -> None:
        """Let the trainer drop a state that is no longer wanted or trusted."""
        if line.worker is not None:
            self.out.append(commands.ForgetModel(line.worker, line.model))
        self.place(line, None)

    def idle(self, line: ModelQueue) -> bool:
        """Whether the model has nothing to do; those that have are `busy`."""
        return not (line.waiting or line.aside)

    # ---- ends ----
    def fail(self, operation: Operation, error: str, owner: FaultOwner) -> None:
        self.out.append(commands.FailOp(operation.request, error, owner))
        self._over(operation, done=False)

    def complete(self, operation: Operation, ticket: int) -> None:
        """The result that came with the ticket is the operation's."""
        self.out.append(commands.CompleteOp(operation.request, ticket))
        self._over(operation, done=True)

    def _over(self, operation: Operation, *, done: bool) -> None:
        over = OpOver(self.now_s, operation.job, operation.request, operation.kind, done)
        self.out.append(over)

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        tickets = [flight.ticket for flight in self.flights.values() if flight is not None]
        assert len(tickets) == len(set(tickets))
        for model, line in self.lines.items():
            assert line.model == model
            line.check_integrity()
            assert line.worker is None or line.worker in self.flights, "state on a lost trainer"
            assert self.idle(line) or self.busy.get(model) is line, "operations nobody looks at"
        held = Counter(line.worker for line in self.lines.values() if line.worker is not None)
        assert +self.held == held, "trainers' models are counted wrong"
