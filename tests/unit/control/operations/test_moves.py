"""A model whose permit is for another node goes there with its state; where that fails, it comes
from the log.
"""

from typing import Any

from slackwater.control.operations import commands as do
from slackwater.control.operations import events as on
from slackwater.control.operations.controller import OperationsController
from slackwater.control.operations.settings import OperationsConfig
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, ModelId, NodeId, RequestId, WorkerId
from slackwater.model.operation import Operation, OpKind

from .durable_body import told

MODEL, JOB = ModelId("m"), JobId("j")
OLD, NEW = WorkerId("1-old"), WorkerId("2-new")
HERE, THERE = NodeId("here"), NodeId("there")


class Fleet:
    """A trainer on each of two nodes; the permit is for one of them."""

    def __init__(self) -> None:
        self.controller = OperationsController(OperationsConfig(give_up_move_after_s=300.0))
        self.said: list[Any] = []
        self.feed(on.TrainerJoined(0.0, OLD, HERE))
        self.feed(on.TrainerJoined(0.0, NEW, THERE))
        self.permit(HERE)
        self.submit(0, OpKind.CREATE)
        self.done()

    def feed(self, event: on.Event) -> list[Any]:
        self.said = told(self.controller, event)
        self.controller.check_integrity()
        return self.said

    def permit(self, node: NodeId) -> None:
        self.feed(on.OpsGated(0.0, JOB, (node,)))

    def submit(self, seq: int, kind: OpKind) -> None:
        operation = Operation(RequestId(f"r{seq}"), MODEL, seq, kind, JOB)
        self.feed(on.OpSubmitted(0.0, operation))

    def done(self, reached: int | None = None) -> None:
        """Whatever was begun last ends well."""
        (begun,) = self.begun()
        self.feed(on.TicketDone(0.0, begun.worker, begun.ticket, 1.0, reached))

    def begun(self) -> list[do.RunOp | do.RestoreModel]:
        return [c for c in self.said if isinstance(c, do.RunOp | do.RestoreModel)]

    def move(self) -> do.MoveState:
        (found,) = [c for c in self.said if isinstance(c, do.MoveState)]
        return found


def two_steps_here() -> Fleet:
    fleet = Fleet()
    for seq in (1, 2):
        fleet.submit(seq, OpKind.FORWARD_BACKWARD)
        fleet.done()
    return fleet


def test_a_state_goes_to_the_permits_node_and_nothing_is_done_twice() -> None:
    fleet = two_steps_here()
    fleet.permit(THERE)
    fleet.submit(3, OpKind.OPTIM_STEP)
    move = fleet.move()
    assert (move.worker, move.model, move.to) == (OLD, MODEL, NEW)
    fleet.submit(4, OpKind.SAVE)
    assert fleet.begun() == []  # nothing touches the state while it is under way
    fleet.feed(on.StateMoved(1.0, MODEL, move.ticket))
    assert do.DropModel(OLD, MODEL) in fleet.said
    (made,) = fleet.begun()
    assert isinstance(made, do.RunOp) and made.operation.kind is OpKind.CREATE
    assert (made.worker, made.at_most) == (NEW, 2)
    fleet.done(reached=2)
    (step,) = fleet.begun()
    assert isinstance(step, do.RunOp) and (step.operation.seq, step.replay) == (3, False)


def test_a_move_that_fails_or_is_not_heard_of_leaves_the_log() -> None:
    for late in (False, True):
        fleet = two_steps_here()
        fleet.permit(THERE)
        fleet.submit(3, OpKind.OPTIM_STEP)
        move = fleet.move()
        (timer,) = [c for c in fleet.said if isinstance(c, SetTimer)]
        if late:
            fleet.feed(TimerFired(timer.at_s, timer.name))
        else:
            fleet.feed(on.StateMoved(1.0, MODEL, move.ticket, "no room there"))
        for seq in (0, 1, 2):
            (replayed,) = fleet.begun()
            assert isinstance(replayed, do.RunOp)
            assert (replayed.worker, replayed.operation.seq) == (NEW, seq)
            fleet.done()
        if late:  # what arrives after all is of no use to anybody
            assert fleet.feed(on.StateMoved(400.0, MODEL, move.ticket)) == [do.ForgetStrays(MODEL)]


def test_a_permit_that_comes_while_a_save_runs_moves_the_state_after_it() -> None:
    fleet = two_steps_here()
    fleet.submit(3, OpKind.SAVE)
    (save,) = fleet.begun()
    fleet.submit(4, OpKind.FORWARD_BACKWARD)
    fleet.permit(THERE)
    assert fleet.said == []
    fleet.feed(on.TicketDone(0.0, OLD, save.ticket, 1.0))
    assert fleet.move().to == NEW


def test_without_a_trainer_there_the_state_stays_where_it_is_until_one_comes() -> None:
    fleet = two_steps_here()
    fleet.feed(on.TrainerLost(0.0, NEW, "killed"))
    fleet.permit(THERE)
    fleet.submit(3, OpKind.FORWARD_BACKWARD)
    assert fleet.said == []
    fleet.feed(on.TrainerJoined(0.0, NEW, THERE))
    assert fleet.move().to == NEW


def test_a_trainer_that_dies_while_its_state_is_sent_ends_the_move() -> None:
    fleet = two_steps_here()
    fleet.permit(THERE)
    fleet.submit(3, OpKind.OPTIM_STEP)
    move = fleet.move()
    fleet.feed(on.TrainerLost(0.0, OLD, "killed"))
    (made,) = fleet.begun()
    assert made.worker == NEW
    assert fleet.feed(on.StateMoved(1.0, MODEL, move.ticket)) == [do.ForgetStrays(MODEL)]
