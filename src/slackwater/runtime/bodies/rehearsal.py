"""A broker tried out once, before anybody waits: its compiled parts are then loaded, or compiled if they never were."""

from slackwater.control.actions import events as on
from slackwater.control.actions.broker import ActionBroker
from slackwater.model.action import ActionSpec, WorkerCapacity
from slackwater.model.amounts import CORES, Amounts, Efficiency, Elastic, Need
from slackwater.model.ids import ActionId, JobId, NodeId


def rehearse() -> None:
    """A few elastic actions on a few cores; nothing is run."""
    broker = ActionBroker()
    broker.handle(on.WorkerJoined(0.0, NodeId("n"), WorkerCapacity(cores=((0, 1, 2, 3),))))
    needs = (Need(CORES, Amounts.between(1, 4)),)
    elastic = Elastic(CORES, Efficiency.amdahl(0.9, 4))
    for number in range(6):
        spec = ActionSpec(
            ActionId(str(number)), JobId("j"), "k", needs, elastic=elastic, single_unit_s=1.0
        )
        broker.handle(on.ActionSubmitted(0.0, spec))
