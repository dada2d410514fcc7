"""Devices of a simulated fleet: reported by agents, which may lie, given out by the allocator, and
held by what really runs.

Each node has eight, in two link domains. A node that is replaced may come back with one device
less, and now and then an agent claims devices of another node.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from slackwater.control.devices.messages import (
    DeploymentsRequested,
    DevicesLost,
    DevicesReported,
    RefuseDeployment,
    StartDeployment,
)
from slackwater.model.device import CUDA, DeploymentRequest, Device
from slackwater.model.ids import DeploymentId, DeviceId, NodeId
from slackwater.model.placement import node_of

if TYPE_CHECKING:
    from slackwater.sim.fleet.fleet import SimulatedFleet

DEVICES, DOMAINS = 8, 2
RANKS = {"trainer": 4, "engine": 2}
IMPOSTOR = NodeId("impostor")
_FAULTY = 0.3  # of the nodes that come back, and of the reports that somebody copies

DeploymentCommand: TypeAlias = StartDeployment | RefuseDeployment


class SimulatedDevices:
    """`held` are the devices of deployments that run. Its own random numbers keep a seed's storm
    what it is.
    """

    def __init__(self, fleet: "SimulatedFleet") -> None:
        self._fleet = fleet
        self._rng = np.random.default_rng((fleet.seed, 24))
        self._here: set[NodeId] = set()
        self.held: dict[DeploymentId, tuple[Device, ...]] = {}

    def start(self, node: NodeId, role: str) -> None:
        """A process of the role is started on the node, or on a part of it: on the devices that it
        has, or on new ones.
        """
        deployment, place, node = DeploymentId(f"{node}.{role}"), node, node_of(node)
        if node not in self._here:
            self._report(node)
        if deployment in self.held:
            return
        # A train node's engine and trainer alternate, by the co-scheduler's permits.
        ranks = RANKS[role] if place == node else 2
        asked = DeploymentRequest(
            deployment, ranks, node=node, kind=CUDA, group=str(place), memory_mb=80_000
        )
        self._fleet.tell(DeploymentsRequested(self._fleet.now_s, (asked,)))
        assert len(self.held[deployment]) == ranks, f"{deployment} has {self.held}"
        self._check_owners()

    def lose_node(self, node: NodeId) -> None:
        """All that ran there is gone."""
        self._here.discard(node)
        self.held = {name: mine for name, mine in self.held.items() if mine[0].node != node}
        self._fleet.tell(DevicesLost(self._fleet.now_s, node))

    def execute(self, command: DeploymentCommand) -> None:
        assert isinstance(command, StartDeployment), f"{command}: a node has enough devices"
        self.held[command.deployment] = command.devices

    def _report(self, node: NodeId) -> None:
        self._here.add(node)
        fleet = self._fleet
        found = [
            Device(
                *(node, index, CUDA, 80_000, str(index * DOMAINS // DEVICES)),
                hardware=f"{node}#{index}",
            )
            for index in range(DEVICES)
        ]
        if fleet.now_s and self._rng.random() < _FAULTY:
            del found[int(self._rng.integers(DEVICES))]
        fleet.tell(DevicesReported(fleet.now_s, node, tuple(found)))
        if self._rng.random() < _FAULTY:
            copied = Device(IMPOSTOR, 0, CUDA, hardware=found[0].hardware)
            fleet.tell(DevicesReported(fleet.now_s, IMPOSTOR, (copied, *found)))
            assert not fleet.controller.allocator.devices(IMPOSTOR), "one GPU on two nodes"

    def _check_owners(self) -> None:
        """What runs on a device alternates: it is the engine and the trainer of one node."""
        owners: dict[DeviceId, list[DeploymentId]] = defaultdict(list)
        for deployment, devices in self.held.items():
            assert len({one.domain for one in devices}) == 1, f"{deployment} spans domains"
            for device in devices:
                owners[device.device].append(deployment)
        for name, running in owners.items():
            nodes = {deployment.rpartition(".")[0] for deployment in running}
            assert len(nodes) == 1, f"{name} is owned by {running}"
            known = self._fleet.controller.allocator.owners(name)
            assert sorted(known) == sorted(running), f"{name}: {known}, really {running}"
