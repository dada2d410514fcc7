"""Trainers of a simulated fleet: they execute orders, lose their states with their processes, and
restore them from snapshots, from what their node kept, or from the log.

A model's state is a chain over the operations that changed it, so that one that is skipped, doubled
or out of order shows in every result after it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

from slackwater.control.operations import commands, events
from slackwater.model.ids import JobId, ModelId, NodeId, WorkerId
from slackwater.model.operation import Operation, OpKind
from slackwater.model.placement import is_within

if TYPE_CHECKING:
    from slackwater.sim.fleet.fleet import SimulatedFleet

_SLICES = 20  # how often running work adapts to the current pace

TrainerCommand: TypeAlias = (
    commands.TrainerOrder
    | commands.CommitSnapshot
    | commands.ForgetModel
    | commands.MoveState
    | commands.ForgetStrays
)
State: TypeAlias = tuple[int, int]  # the chain, and the last operation in it


def chained(chain: int, seq: int) -> int:
    """The state after one more operation."""
    return crc32(f"{chain}/{seq}".encode())


@dataclass(slots=True)
class SimulatedTrainer:
    """One process; `job` is that of its last order."""

    worker: WorkerId
    node: NodeId
    states: dict[ModelId, State] = field(default_factory=dict)
    ticket: int | None = None
    job: JobId | None = None
    dropped: set[ModelId] = field(default_factory=set)

    def forget(self, model: ModelId) -> None:
        """Its messages come in order: what it is told while it works it does afterwards."""
        if self.ticket is None:
            self.states.pop(model, None)
        else:
            self.dropped.add(model)

    def finish(self) -> None:
        """It has done its order."""
        for model in self.dropped:
            self.states.pop(model, None)
        self.dropped.clear()


class SimulatedTrainers:
    """One per train node. `results` has the state after each operation that ran, by ticket."""

    def __init__(self, fleet: "SimulatedFleet") -> None:
        self._fleet = fleet
        self.living: dict[WorkerId, SimulatedTrainer] = {}
        self.results: dict[int, int] = {}
        self._snapshots: dict[tuple[ModelId, int], State] = {}
        self._kept: dict[tuple[NodeId, ModelId], State] = {}
        self._starts = 0
        self.moves = 0

    # ---- processes ----
    def start(self, node: NodeId) -> None:
        """The node's trainer comes up, empty."""
        self._fleet.started(node, "trainer")
        self._starts += 1
        worker = WorkerId(f"{node}/trainer/{self._starts}")
        self.living[worker] = SimulatedTrainer(worker, node)
        self._fleet.tell(events.TrainerJoined(self._fleet.now_s, worker, node))

    def lose_node(self, node: NodeId, why: str) -> None:
        """Its trainer is gone, with what it held; another comes up when the node is heard again."""
        fleet = self._fleet
        for worker in [name for name, one in self.living.items() if is_within(one.node, node)]:
            place = self.living.pop(worker).node
            fleet.tell(events.TrainerLost(fleet.now_s, worker, why))
            wait_s = fleet.silent_s(node) + fleet.costs.start_s
            fleet.after(wait_s, partial(self.start, place))

    def execute(self, command: TrainerCommand) -> None:
        match command:
            case commands.RunOp():
                self._begin(command, command.operation, self._op_s(command.operation))
            case commands.RestoreState() | commands.TakeSnapshot() | commands.DropGradients():
                self._begin(command, None, self._fleet.costs.load_s)
            case commands.ForgetModel(worker, model):
                if worker in self.living:
                    self.living[worker].forget(model)
            case commands.MoveState():
                self._fleet.after(self._fleet.costs.load_s, partial(self._moved, command))
            case commands.ForgetStrays(model):
                self._kept = {key: kept for key, kept in self._kept.items() if key[1] != model}
            case commands.CommitSnapshot():
                pass  # it is durable when the trainer has written it

    def _moved(self, order: commands.MoveState) -> None:
        """The state is in the memory of the other node, unless one of the trainers is gone."""
        fleet = self._fleet
        source, target = self.living.get(order.worker), self.living.get(order.to)
        found = None if source is None else source.states.get(order.model)
        error = "the connection broke"
        if found is not None and target is not None and not fleet.chance(fleet.broken_moves):
            self._kept[target.node, order.model] = found
            self.moves += 1
            error = ""
        fleet.tell(events.StateMoved(fleet.now_s, order.model, order.ticket, error))

    # ---- orders ----
    def _op_s(self, op: Operation) -> float:
        job = self._fleet.jobs[op.job]
        train_s = job.lengths.train_s_on(job.train_nodes)
        match op.kind:
            case OpKind.FORWARD_BACKWARD:
                return 0.9 * train_s
            case OpKind.OPTIM_STEP:
                return 0.1 * train_s
            case OpKind.CREATE:
                return self._fleet.costs.load_s
            case _:
                return 0.0

    def _begin(self, order: commands.TrainerOrder, op: Operation | None, work_s: float) -> None:
        trainer = self.living.get(order.worker)
        assert trainer is not None, f"an order for {order.worker}, which is gone"
        assert trainer.ticket is None, f"{order.worker} has two orders at once"
        trainer.ticket = order.ticket
        if (
            isinstance(order, commands.RunOp)
            and order.operation.kind.needs_permit
            and not order.replay
        ):
            self._fleet.check_may_train(order.operation.job, trainer.node)
        if op is not None and trainer.job != op.job:
            trainer.job = op.job
            work_s += self._fleet.costs.switch_s
        self._work(trainer, order, work_s, _SLICES)

    def _work(
        self, trainer: SimulatedTrainer, order: commands.TrainerOrder, work_s: float, slices: int
    ) -> None:
        """So many slices are left; each is as long as the machine lets it be."""
        fleet = self._fleet
        if self.living.get(trainer.worker) is not trainer:
            return
        if slices and work_s:
            slice_s = work_s / _SLICES / fleet.pace()
            fleet.after(slice_s, partial(self._work, trainer, order, work_s, slices - 1))
        elif silent_s := fleet.silent_s(trainer.node):
            fleet.after(silent_s, partial(self._work, trainer, order, work_s, 0))
        else:
            trainer.ticket = None
            tell = self._done(trainer, order, work_s)
            trainer.finish()
            tell()

    def _done(
        self, trainer: SimulatedTrainer, order: commands.TrainerOrder, took_s: float
    ) -> Callable[[], None]:
        """Do it; what is returned says so."""
        fleet, reached = self._fleet, None
        match order:
            case commands.RunOp(_, ticket, op, _, at_most):
                if op.kind is OpKind.PUBLISH:
                    self.results[ticket] = trainer.states[op.model][0]
                    return partial(self._publish, trainer, ticket, op)
                reached = self._apply(trainer, op, at_most)
                self.results[ticket] = trainer.states[op.model][0]
            case commands.RestoreState(_, _, model, seq, at_most):
                reached = self._find(trainer, model, at_most)
                if reached is None:
                    trainer.states[model] = self._snapshots[model, seq]
            case commands.TakeSnapshot(_, _, model, seq):
                self._snapshots[model, seq] = trainer.states[model]
            case commands.DropGradients():
                pass
        done = (trainer.worker, order.ticket, took_s, reached)
        return partial(fleet.tell, events.TicketDone(fleet.now_s, *done))

    def _apply(self, trainer: SimulatedTrainer, op: Operation, at_most: int) -> int | None:
        if op.kind is OpKind.CREATE:
            if (reached := self._find(trainer, op.model, at_most)) is not None:
                return reached
            trainer.states[op.model] = (chained(0, op.seq), op.seq)
        else:
            chain, last = trainer.states[op.model]
            assert last < op.seq, f"{op.model}: {op.seq} runs after {last}"
            trainer.states[op.model] = (chained(chain, op.seq), op.seq)
        return None

    def _find(self, trainer: SimulatedTrainer, model: ModelId, at_most: int) -> int | None:
        """A later state that the node keeps, as far as it may be used."""
        kept = self._kept.pop((trainer.node, model), None)
        if kept is None or kept[1] > at_most:
            return None
        trainer.states[model] = kept
        return kept[1]

    def _publish(self, trainer: SimulatedTrainer, ticket: int, op: Operation) -> None:
        """The copy is made at once; the writing takes as long as the job's sync."""
        fleet = self._fleet
        fleet.tell(events.TicketDetached(fleet.now_s, trainer.worker, ticket))
        sync_s = fleet.jobs[op.job].lengths.sync_s
        fleet.after(sync_s, partial(self._written, trainer, ticket, sync_s))

    def _written(self, trainer: SimulatedTrainer, ticket: int, took_s: float) -> None:
        fleet = self._fleet
        if self.living.get(trainer.worker) is not trainer:
            return
        if silent_s := fleet.silent_s(trainer.node):
            fleet.after(silent_s, partial(self._written, trainer, ticket, took_s))
            return
        fleet.tell(events.TicketDone(fleet.now_s, trainer.worker, ticket, took_s))
