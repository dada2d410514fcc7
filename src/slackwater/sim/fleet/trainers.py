"""Trainers of a simulated fleet: they execute orders, lose their states with their processes, and
restore them from snapshots, from their node's memory, or from the log.

A model's state is a hash chain over the operations that changed it, so that a skipped, repeated or
reordered operation changes every later result.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias
from zlib import crc32

from slackwater.control.operations import commands, events
from slackwater.model.ids import JobId, ModelId, NodeId, WorkerId
from slackwater.model.operation import Operation, OpKind
from slackwater.model.placement import Phase, is_within
from slackwater.sim.fleet.context import FleetContext

_SLICES = 20  # how often running work adapts to the current pace

TrainerCommand: TypeAlias = (
    commands.TrainerOrder
    | commands.CommitSnapshot
    | commands.DropModel
    | commands.MoveState
    | commands.ForgetStrays
)
State: TypeAlias = tuple[int, int]  # the chain, and the last operation in it


def extend_chain(chain: int, seq: int) -> int:
    """The chain after one more operation."""
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
        """Drop a state, after the current order: a trainer handles its messages in order."""
        if self.ticket is None:
            self.states.pop(model, None)
        else:
            self.dropped.add(model)

    def finish(self) -> None:
        """End the current order."""
        for model in self.dropped:
            self.states.pop(model, None)
        self.dropped.clear()


class SimulatedTrainers:
    """One per train node. `results` has the state after each executed operation, by ticket."""

    def __init__(self, fleet: FleetContext) -> None:
        self._fleet = fleet
        self.living: dict[WorkerId, SimulatedTrainer] = {}
        self.results: dict[int, int] = {}
        self._snapshots: dict[tuple[ModelId, int], State] = {}
        self._kept: dict[tuple[NodeId, ModelId], State] = {}
        self._starts = 0
        self.moves = 0

    # ---- processes ----
    def start(self, node: NodeId) -> None:
        """Start the node's trainer, without states."""
        self._fleet.record_start(node, "trainer")
        self._starts += 1
        worker = WorkerId(f"{node}/trainer/{self._starts}")
        self.living[worker] = SimulatedTrainer(worker, node)
        self._fleet.tell(events.TrainerJoined(self._fleet.now_s, worker, node))

    def lose_node(self, node: NodeId, why: str) -> None:
        """Lose the node's trainer with its states; another starts once the node is reachable."""
        fleet = self._fleet
        for worker in [name for name, each in self.living.items() if is_within(each.node, node)]:
            place = self.living.pop(worker).node
            fleet.tell(events.TrainerLost(fleet.now_s, worker, why))
            wait_s = fleet.silent_s(node) + fleet.costs.start_s
            fleet.after(wait_s, partial(self.start, place))

    def execute(self, command: TrainerCommand) -> None:
        match command:
            case commands.RunOp():
                self._begin(command, command.operation, self._op_s(command.operation))
            case commands.RestoreModel() | commands.SaveState() | commands.DiscardGradients():
                self._begin(command, None, self._fleet.costs.load_s)
            case commands.DropModel(worker, model):
                if worker in self.living:
                    self.living[worker].forget(model)
            case commands.MoveState():
                self._fleet.after(self._fleet.costs.load_s, partial(self._finish_move, command))
            case commands.ForgetStrays(model):
                self._kept = {key: kept for key, kept in self._kept.items() if key[1] != model}
            case commands.CommitSnapshot():
                pass  # it is durable when the trainer has written it

    def _finish_move(self, order: commands.MoveState) -> None:
        """Put the state into the other node's memory, unless one of the trainers was lost."""
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
        assert trainer is not None, f"an order for {order.worker}, which was lost"
        assert trainer.ticket is None, f"{order.worker} has two orders at once"
        trainer.ticket = order.ticket
        if (
            isinstance(order, commands.RunOp)
            and order.operation.kind.needs_permit
            and not order.replay
        ):
            job, node = order.operation.job, trainer.node
            may_train = self._fleet.has_permit(job, Phase.TRAIN, node)
            assert may_train, f"{job} trains on {node} without a permit"
        if op is not None and trainer.job != op.job:
            trainer.job = op.job
            work_s += self._fleet.costs.switch_s
        self._work(trainer, order, work_s, _SLICES)

    def _work(
        self, trainer: SimulatedTrainer, order: commands.TrainerOrder, work_s: float, slices: int
    ) -> None:
        """Work on the remaining slices; the pace sets the length of each."""
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
            tell = self._complete_order(trainer, order, work_s)
            trainer.finish()
            tell()

    def _complete_order(
        self, trainer: SimulatedTrainer, order: commands.TrainerOrder, took_s: float
    ) -> Callable[[], None]:
        """Execute an order; return the function that reports it."""
        fleet, reached = self._fleet, None
        match order:
            case commands.RunOp(_, ticket, op, _, at_most):
                if op.kind is OpKind.PUBLISH:
                    self.results[ticket] = trainer.states[op.model][0]
                    return partial(self._publish, trainer, ticket, op)
                reached = self._apply(trainer, op, at_most)
                self.results[ticket] = trainer.states[op.model][0]
            case commands.RestoreModel(_, _, model, seq, at_most):
                reached = self._find(trainer, model, at_most)
                if reached is None:
                    trainer.states[model] = self._snapshots[model, seq]
            case commands.SaveState(_, _, model, seq):
                self._snapshots[model, seq] = trainer.states[model]
            case commands.DiscardGradients():
                pass
        done = events.TicketDone(fleet.now_s, trainer.worker, order.ticket, took_s, reached)
        return partial(fleet.tell, done)

    def _apply(self, trainer: SimulatedTrainer, op: Operation, at_most: int) -> int | None:
        if op.kind is OpKind.CREATE:
            if (reached := self._find(trainer, op.model, at_most)) is not None:
                return reached
            trainer.states[op.model] = (extend_chain(0, op.seq), op.seq)
        else:
            chain, last = trainer.states[op.model]
            assert last < op.seq, f"{op.model}: {op.seq} runs after {last}"
            trainer.states[op.model] = (extend_chain(chain, op.seq), op.seq)
        return None

    def _find(self, trainer: SimulatedTrainer, model: ModelId, at_most: int) -> int | None:
        """Take a later state from the node's memory, if there is one up to `at_most`."""
        kept = self._kept.pop((trainer.node, model), None)
        if kept is None or kept[1] > at_most:
            return None
        trainer.states[model] = kept
        return kept[1]

    def _publish(self, trainer: SimulatedTrainer, ticket: int, op: Operation) -> None:
        """Copy at once, and write for as long as the job's sync."""
        fleet = self._fleet
        fleet.tell(events.TicketDetached(fleet.now_s, trainer.worker, ticket))
        sync_s = fleet.jobs[op.job].lengths.sync_s
        fleet.after(sync_s, partial(self._finish_write, trainer, ticket, sync_s))

    def _finish_write(self, trainer: SimulatedTrainer, ticket: int, took_s: float) -> None:
        fleet = self._fleet
        if self.living.get(trainer.worker) is not trainer:
            return
        if silent_s := fleet.silent_s(trainer.node):
            fleet.after(silent_s, partial(self._finish_write, trainer, ticket, took_s))
            return
        fleet.tell(events.TicketDone(fleet.now_s, trainer.worker, ticket, took_s))
