"""A body for the operations controller: a durable log, trainers of two nodes that can be lost,
gates, and a service that can die.

State is a chain of hashes, so that any operation that is skipped, doubled or out of order shows in
every result after it.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slackwater.control.operations import commands as do
from slackwater.control.operations import events as on
from slackwater.control.operations.controller import OperationsController
from slackwater.control.operations.facts import DispatchDue, OpEnded, PublishDetached
from slackwater.control.operations.settings import OperationsConfig
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import ModelId, NodeId, RequestId, WorkerId
from slackwater.model.operation import (
    NO_JOB,
    FaultOwner,
    Operation,
    OperationRecord,
    OpKind,
    OpStatus,
)


def told(controller: OperationsController, event: on.Event) -> list[Any]:
    """What the controller says to an event, and to what it says to itself."""
    commands = controller.handle(event)
    said = orders(commands)
    for due in [command for command in commands if isinstance(command, DispatchDue)]:
        said += told(controller, due)
    return said


def orders(commands: Sequence[do.Command]) -> list[Any]:
    """What is left where nobody shares devices or infers phases: orders reach trainers at once."""
    return [
        command.order if isinstance(command, do.StartWork) else command
        for command in commands
        if not isinstance(command, OpEnded | PublishDetached | DispatchDue)
    ]


@dataclass(frozen=True)
class Script:
    """One operation of a client, and what is wrong with it."""

    operation: Operation
    rejected: bool = False  # refused at the door
    refused: bool = False  # refused by the trainer
    lost: bool = False  # never sent: it counts as a refused forward_backward


NODES = (NodeId("n0"), NodeId("n1"))


def chain(value: str, *more: object) -> str:
    return hashlib.sha256(repr((value, more)).encode()).hexdigest()[:12]


@dataclass
class State:
    """What a trainer holds of a model."""

    weights: str = "new"
    gradients: tuple[int, ...] = ()

    def copy(self) -> "State":
        return State(self.weights, self.gradients)


def run_operation(state: State, operation: Operation) -> str:
    """The one meaning of an operation, for the trainer and for the reference."""
    match operation.kind:
        case OpKind.FORWARD_BACKWARD:
            state.gradients += (operation.seq,)
        case OpKind.OPTIM_STEP:
            state.weights, state.gradients = chain(state.weights, state.gradients), ()
        case OpKind.LOAD:
            state.weights, state.gradients = chain("loaded", operation.seq), ()
        case _:
            pass
    return chain(state.weights, state.gradients, operation.seq)


def expected_results(script: list[Script]) -> dict[RequestId, str | None]:
    """What each accepted request must answer (None: it fails), by the rules as they are
    documented.
    """
    state, poisoned = State(), False
    results: dict[RequestId, str | None] = {}
    for line in sorted(script, key=lambda line: line.operation.seq):
        operation = line.operation
        if line.lost:
            poisoned |= any(
                later.operation.seq > operation.seq and not later.lost for later in script
            )
        elif operation.kind is OpKind.OPTIM_STEP:
            fails = line.rejected or line.refused or poisoned
            poisoned = False
            if fails:
                state.gradients = ()
        else:
            fails = line.rejected or line.refused
            poisoned |= fails and operation.kind is OpKind.FORWARD_BACKWARD
            poisoned &= fails or operation.kind is not OpKind.LOAD
        if not line.rejected and not line.lost:
            results[operation.request] = None if fails else run_operation(state, operation)
    return results


@dataclass
class Body:
    """Everything around the controller, driven by a seeded random source."""

    chance: random.Random
    config: OperationsConfig
    scripts: dict[ModelId, list[Script]]
    now_s: float = 0.0
    controller: OperationsController = field(init=False)
    log: dict[ModelId, dict[int, OperationRecord]] = field(default_factory=dict)
    saved: dict[ModelId, tuple[int, State]] = field(default_factory=dict)
    drafts: dict[tuple[ModelId, int], State] = field(default_factory=dict)
    trainers: dict[WorkerId, dict[ModelId, State]] = field(default_factory=dict)
    nodes: dict[WorkerId, NodeId] = field(default_factory=dict)
    # By a node, in its memory: the state of a model after a seq.
    kept: dict[tuple[NodeId, ModelId], tuple[int, State]] = field(default_factory=dict)
    reached: dict[tuple[WorkerId, ModelId], int] = field(default_factory=dict)
    moves: list[do.MoveState] = field(default_factory=list)
    taken: int = 0  # states that outlived their trainer, or came from another node
    arrived: int = 0
    inbox: dict[WorkerId, list[Any]] = field(default_factory=dict)
    writing: dict[WorkerId, list[tuple[int, str | None]]] = field(default_factory=dict)
    timers: dict[str, float] = field(default_factory=dict)
    results: dict[RequestId, str | None] = field(default_factory=dict)
    made: int = 0

    def __post_init__(self) -> None:
        self.controller = OperationsController(self.config)
        self._refused = {
            line.operation.request: line.refused for s in self.scripts.values() for line in s
        }

    # ---- the client ----
    def submit(self, line: Script) -> None:
        operation = line.operation
        status = OpStatus.FAILED if line.rejected else OpStatus.WAITING
        self.log.setdefault(operation.model, {})[operation.seq] = OperationRecord(operation, status)
        if line.rejected:
            self.feed(on.OpRejected(self.now_s, operation, "bad"))
        else:
            self.feed(on.OpSubmitted(self.now_s, operation))

    # ---- faults ----
    def join_trainer(self) -> None:
        self.made += 1
        worker = WorkerId(f"t{self.made}")
        others = {self.nodes[other] for other in self.trainers}
        self.nodes[worker] = self.chance.choice([n for n in NODES if n not in others] or NODES)
        self.trainers[worker], self.inbox[worker] = {}, []
        self.feed(on.TrainerJoined(self.now_s, worker, self.nodes[worker]))

    def lose_trainer(self, worker: WorkerId) -> None:
        """Its node keeps what it had offloaded, perhaps with the effect of an operation that nobody
        heard the end of.
        """
        unheard = self.inbox[worker][:1]
        if unheard and isinstance(unheard[0], do.RunOp) and self.chance.random() < 0.5:
            self._do(worker, unheard[0])
        del self.trainers[worker], self.inbox[worker]
        self.writing.pop(worker, None)
        self.feed(on.TrainerLost(self.now_s, worker, "killed"))

    def gate_anew(self) -> None:
        self.gate(self.chance.choice((NODES[:1], NODES[1:], NODES, (), None)))

    def gate(self, nodes: tuple[NodeId, ...] | None) -> None:
        """All models are of one job, whose permit is for these nodes."""
        self.feed(on.OpsGated(self.now_s, NO_JOB, nodes))

    def move(self) -> None:
        """A state arrives in another node's memory, or does not; or it does, and nobody hears of it
        in time.
        """
        order = self.moves.pop(self.chance.randrange(len(self.moves)))
        held = self.trainers.get(order.worker, {}).get(order.model)
        how = self.chance.choice(("well", "well", "badly", "unheard"))
        if held is not None and how != "badly" and order.to in self.nodes:
            seq = self.reached[order.worker, order.model]
            self.kept[self.nodes[order.to], order.model] = (seq, held.copy())
            self.arrived += 1
        if how == "unheard":
            name = f"move:{order.ticket}:{order.model}"
            self.now_s = max(self.now_s, self.timers.pop(name, 0.0))
            self.feed(TimerFired(self.now_s, name))
        error = "" if held is not None and how == "well" else "broke off"
        self.feed(on.StateMoved(self.now_s, order.model, order.ticket, error))

    def restart_service(self) -> None:
        """Everything in memory is gone; the log and the saved states are not."""
        self.trainers, self.inbox, self.timers, self.writing, self.kept = {}, {}, {}, {}, {}
        self.moves = []
        self.controller = OperationsController(self.config)
        for model, records in self.log.items():
            saved_seq = self.saved[model][0] if model in self.saved else None
            left = tuple(r for seq, r in records.items() if saved_seq is None or seq > saved_seq)
            self.feed(on.ModelAdopted(self.now_s, model, saved_seq, left))

    def fire_timer(self) -> None:
        """Let time pass up to the next timer."""
        name = min(self.timers, key=lambda name: self.timers[name])
        self.now_s = max(self.now_s, self.timers.pop(name))
        self.feed(TimerFired(self.now_s, name))

    # ---- trainers ----
    def work(self, worker: WorkerId) -> None:
        """Do the first thing in a trainer's inbox, and report."""
        command = self.inbox[worker].pop(0)
        held = self.trainers[worker]
        if isinstance(command, do.DropModel):
            held.pop(command.model, None)
            self.kept.pop((self.nodes[worker], command.model), None)
            return
        assert isinstance(command, do.RunOp | do.RestoreModel | do.DiscardGradients | do.SaveState)
        result = self._do(worker, command)
        if (reached := self._found(worker, command)) is not None:
            done = on.TicketDone(self.now_s, worker, command.ticket, 1.0, reached)
            self.feed(done, result or "")
            return
        publishes = isinstance(command, do.RunOp) and command.operation.kind is OpKind.PUBLISH
        if publishes and self.chance.random() < 0.7:
            self.writing.setdefault(worker, []).append((command.ticket, result))
            self.feed(on.TicketDetached(self.now_s, worker, command.ticket))
        else:
            self._report(worker, command.ticket, result)

    def _found(self, worker: WorkerId, command: Any) -> int | None:
        """The node may have kept a later state than the one that was to be made."""
        if isinstance(command, do.RestoreModel):
            model, made = command.model, command.seq
        elif isinstance(command, do.RunOp) and command.operation.kind is OpKind.CREATE:
            model, made = command.operation.model, command.operation.seq
        else:
            return None
        seq, state = self.kept.get((self.nodes[worker], model), (-1, State()))
        if not made < seq <= command.at_most:
            return None
        self.taken += 1
        self.trainers[worker][model] = state.copy()
        self.reached[worker, model] = seq
        return seq

    def _keep(self, worker: WorkerId, model: ModelId, seq: int) -> None:
        """Now and then a state is offloaded."""
        self.reached[worker, model] = seq
        if self.chance.random() < 0.5:
            state = self.trainers[worker][model]
            self.kept[self.nodes[worker], model] = (seq, state.copy())

    def _forget_strays(self, model: ModelId) -> None:
        held = {self.nodes[worker] for worker, states in self.trainers.items() if model in states}
        for node in set(NODES) - held:
            self.kept.pop((node, model), None)

    def write(self, worker: WorkerId) -> None:
        """One of the publishes that a trainer set aside is written, or could not be."""
        place = self.chance.randrange(len(self.writing[worker]))
        self._report(worker, *self.writing[worker].pop(place))

    def _report(self, worker: WorkerId, ticket: int, result: str | None) -> None:
        if result is None:
            user = FaultOwner.USER
            self.feed(on.TicketFailed(self.now_s, worker, ticket, "refused", user, False))
        else:
            self.feed(on.TicketDone(self.now_s, worker, ticket, 1.0), result)

    def _do(
        self,
        worker: WorkerId,
        command: do.RunOp | do.RestoreModel | do.DiscardGradients | do.SaveState,
    ) -> str | None:
        held = self.trainers[worker]
        match command:
            case do.RunOp(_, _, operation, replay):
                if operation.kind is OpKind.CREATE:
                    held[operation.model] = State()
                if self._refused[operation.request]:
                    unwritten = operation.kind is OpKind.PUBLISH
                    assert not replay or unwritten, "a refused operation was replayed"
                    return None
                result = run_operation(held[operation.model], operation)
                self._keep(worker, operation.model, operation.seq)
                return result
            case do.RestoreModel(_, _, model, seq):
                assert self.saved[model][0] == seq
                held[model] = self.saved[model][1].copy()
                self.reached[worker, model] = seq
            case do.DiscardGradients(_, _, model, seq):
                held[model].gradients = ()
                self._keep(worker, model, seq)
            case do.SaveState(_, _, model, seq):
                self.drafts[model, seq] = held[model].copy()
        return ""

    # ---- the controller ----
    def feed(self, event: on.Event, result: str = "") -> None:
        for command in told(self.controller, event):
            match command:
                case do.CompleteOp(request):
                    self._end(request, result or "saved", OpStatus.DONE)
                case do.FailOp(request):
                    self._end(request, None, OpStatus.FAILED)
                case do.CommitSnapshot(model, seq):
                    self.saved[model] = (seq, self.drafts[model, seq])
                case SetTimer(name, at_s):
                    self.timers[name] = at_s
                case do.MoveState():
                    self.moves.append(command)
                case do.ForgetStrays(model):
                    self._forget_strays(model)
                case _:
                    self.inbox[command.worker].append(command)
        self.controller.check_integrity()

    def _end(self, request: RequestId, result: str | None, status: OpStatus) -> None:
        assert request not in self.results, "a request ended twice"
        self.results[request] = result
        for records in self.log.values():
            for seq, record in records.items():
                if record.operation.request == request:
                    records[seq] = OperationRecord(record.operation, status)
