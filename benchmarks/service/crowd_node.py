"""A node of a service whose engines compute nothing, all in one process: it takes the control
plane's orders to start engines, and connects them (`benchmarks/rollout/paced_engines.py`).

    python -m benchmarks.service.crowd_node HOST:PORT NODE ENGINES SLOTS STEPS_PER_S LONGEST

The node's key comes in the environment.
"""

import os
import sys

from benchmarks.rollout.paced_engines import (
    SECRET_VARIABLE,
    PacedEngine,
    WireConnection,
    run_paced,
)
from slackwater.model.device import Device
from slackwater.model.ids import NodeId
from slackwater.wire import messages
from slackwater.wire.agent import NodeFacts, StartWorker, WorkerStarted

MODEL = "tiny"
_BEAT_STEPS = 12


class CrowdAgent(WireConnection):
    """The connection of the node's agent."""

    def __init__(self, address: tuple[str, int], key: str, node: str) -> None:
        facts = NodeFacts(node, pid=os.getpid(), devices=(Device(NodeId(node), 0),))
        hello = messages.Hello(f"agent:{node}", "agent", node=facts)
        super().__init__(address, key, hello)
        self._steps = 0

    def take_orders(self) -> list[StartWorker]:
        """Wait for orders, and report the workers as started."""
        orders = [order for order in self.receive() if isinstance(order, StartWorker)]
        for order in orders:
            self.send(messages.encode(WorkerStarted(order.worker, os.getpid())))
        return orders

    def take_messages(self) -> None:
        """All engines run; later orders are not followed."""
        self.receive()

    def step(self) -> None:
        self._steps += 1
        if self._steps % _BEAT_STEPS == 0:
            self.send(messages.encode(messages.Heartbeat()))


def main(
    connect: str, node: str, engines: int, slots: int, steps_per_s: float, longest: int
) -> None:
    host, _, port = connect.rpartition(":")
    address = (host, int(port))
    agent = CrowdAgent(address, os.environ[SECRET_VARIABLE], node)
    orders: list[StartWorker] = []
    while len(orders) < engines:
        orders += agent.take_orders()
    paced = [
        PacedEngine(order.worker, address, order.key, slots, longest=longest, base_model=MODEL)
        for order in orders
    ]
    run_paced([*paced, agent], steps_per_s)


if __name__ == "__main__":
    try:
        _, hub, name, count, places, pace, most = sys.argv
        main(hub, name, int(count), int(places), float(pace), int(most))
    except ConnectionError:
        sys.exit(0)  # the service has stopped
