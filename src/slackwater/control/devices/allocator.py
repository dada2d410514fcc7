"""The device allocator: which deployment owns which devices.

A deployment gets all the devices that it asks for or none, within one link domain where one has
room, always on one node. A device has one owner; only deployments of one sharing group, which
permits make alternate, may own the same one. A deployment that comes back after its node or the
control plane was lost gets the devices that it had, unless they are gone.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slackwater.control.devices.messages import (
    AllocationCommand,
    AllocationEvent,
    AssignmentsRestored,
    DeploymentReleased,
    DeploymentsRequested,
    DevicesLost,
    DevicesReported,
    RefuseDeployment,
    StartDeployment,
)
from slackwater.model.device import DeploymentRequest, Device
from slackwater.model.ids import DeploymentId, DeviceId, NodeId

OwnerTable: TypeAlias = dict[DeviceId, list[DeploymentId]]


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """The devices of a deployment, in the order of its ranks."""

    devices: tuple[Device, ...]
    group: str


class DeviceAllocator:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self) -> None:
        self._devices: dict[NodeId, tuple[Device, ...]] = {}
        self._assigned: dict[DeploymentId, DeviceAssignment] = {}
        self._remembered: dict[DeploymentId, tuple[DeviceId, ...]] = {}
        self._refused: dict[DeploymentId, tuple[NodeId | None, str]] = {}

    def handle(self, event: AllocationEvent) -> Sequence[AllocationCommand]:
        """Take one event; return what follows, in order."""
        match event:
            case DevicesReported(_, node, devices):
                self._forget_node(node)
                self._devices[node] = self._believed(node, devices)
            case DevicesLost(_, node):
                self._forget_node(node)
            case DeploymentsRequested(_, requests):
                return [self._allocate(request) for request in requests]
            case DeploymentReleased(_, deployment):
                self._assigned.pop(deployment, None)
                self._remembered.pop(deployment, None)
                self._refused.pop(deployment, None)
            case AssignmentsRestored(_, assignments):
                self._remembered |= assignments
        return ()

    # ---- questions ----
    def conflict(self, node: NodeId, devices: Iterable[Device]) -> str | None:
        """Why the devices cannot be those of this node: another node has reported one of them."""
        claimed = self._hardware_of_others(node)
        for device in devices:
            if (other := claimed.get(device.hardware)) is not None:
                return (
                    f"node {node}: {device.device} ({device.hardware}) is already "
                    f"{other.device}; give every node GPUs of its own with --gpu-ids"
                )
        return None

    def devices(self, node: NodeId) -> tuple[Device, ...]:
        """Of a node that is here."""
        return self._devices.get(node, ())

    def owners(self, device: DeviceId) -> list[DeploymentId]:
        return self._owner_table()[device]

    def refused(self, node: NodeId) -> dict[DeploymentId, str]:
        """Deployments that got no devices of the node, and why."""
        return {name: why for name, (at, why) in self._refused.items() if at == node}

    def assignments(self) -> dict[DeploymentId, tuple[DeviceId, ...]]:
        """What a new control plane must know."""
        held = {
            deployment: tuple(device.device for device in assigned.devices)
            for deployment, assigned in self._assigned.items()
        }
        return self._remembered | held

    def has_room(self, node: NodeId, kind: str) -> bool:
        """Whether the node has a device of the kind that is free, or has only one, which all
        share.
        """
        mine = [device for device in self.devices(node) if device.kind == kind]
        owners = self._owner_table()
        return len(mine) == 1 or any(not owners[device.device] for device in mine)

    # ---- decisions ----
    def _allocate(self, request: DeploymentRequest) -> AllocationCommand:
        deployment = request.deployment
        if (held := self._assigned.get(deployment)) is not None:
            return StartDeployment(deployment, held.devices)
        owners = self._owner_table()
        eligible = self._eligible(request)
        usable = [one for one in eligible if self._may_own(owners[one.device], request)]
        chosen = self._as_before(request, usable) or self._choose(request, usable, owners)
        self._refused.pop(deployment, None)
        if chosen is None:
            reason = self._reason(request, owners)
            self._refused[deployment] = (request.node, reason)
            return RefuseDeployment(deployment, reason)
        self._remembered.pop(deployment, None)
        self._assigned[deployment] = DeviceAssignment(chosen, request.group)
        return StartDeployment(deployment, chosen)

    def _of_kind(self, request: DeploymentRequest) -> list[Device]:
        nodes = sorted(self._devices) if request.node is None else [request.node]
        return [one for node in nodes for one in self.devices(node) if one.kind == request.kind]

    def _eligible(self, request: DeploymentRequest) -> list[Device]:
        return [
            device
            for device in self._of_kind(request)
            if not device.memory_mb or device.memory_mb >= request.memory_mb
        ]

    def _may_own(self, owners: Sequence[DeploymentId], request: DeploymentRequest) -> bool:
        """A device is free, or owned by deployments that the new one alternates with."""
        groups = {self._assigned[owner].group for owner in owners}
        return not groups or (request.group != "" and groups == {request.group})

    def _as_before(
        self, request: DeploymentRequest, usable: Sequence[Device]
    ) -> tuple[Device, ...] | None:
        known = {device.device: device for device in usable}
        before = self._remembered.get(request.deployment, ())
        if len(before) != request.devices or not all(name in known for name in before):
            return None
        return tuple(known[name] for name in before)

    def _choose(
        self, request: DeploymentRequest, usable: Sequence[Device], owners: OwnerTable
    ) -> tuple[Device, ...] | None:
        """Devices of its group if it has enough, else of one link domain, else of one node; of
        those that have room the one with the least, and devices that nobody is to have again first.
        """
        expected = {name for names in self._remembered.values() for name in names}
        ranked = sorted(usable, key=lambda one: (one.device in expected, len(owners[one.device])))
        owned = [device for device in ranked if owners[device.device]]
        for rooms in (
            _by_place(owned, within_domain=False),
            _by_place(ranked, within_domain=True),
            _by_place(ranked, within_domain=False),
        ):
            fitting = [room for room in rooms if len(room) >= request.devices]
            if fitting:
                return min(
                    (tuple(room[: request.devices]) for room in sorted(fitting, key=len)),
                    key=lambda chosen: sum(one.device in expected for one in chosen),
                )
        return None

    def _reason(self, request: DeploymentRequest, owners: OwnerTable) -> str:
        count, found = request.devices, self._of_kind(request)
        where = "any node" if request.node is None else f"node {request.node}"
        needs = f"{request.deployment} needs {count} {request.kind} device{'s' * (count > 1)}"
        most = max(map(len, _by_place(found, within_domain=False)), default=0)
        if most < count:
            return f"{needs}; the most of {where} is {most}"
        largest = max(device.memory_mb for device in found)
        if len(self._eligible(request)) < count:
            return (
                f"{needs} of {request.memory_mb} MiB each; the largest of {where} has {largest} "
                "MiB: spread the model over more devices, such as tp=2"
            )
        held = [f"{one.device} by {owners[one.device][0]}" for one in found if owners[one.device]]
        return f"{needs}; of {where} are owned {', '.join(held)}: start fewer deployments"

    # ---- bookkeeping ----
    def _owner_table(self) -> OwnerTable:
        table: OwnerTable = defaultdict(list)
        for deployment, assigned in self._assigned.items():
            for device in assigned.devices:
                table[device.device].append(deployment)
        return table

    def _forget_node(self, node: NodeId) -> None:
        """Its deployments are gone with it; each is to have the same devices again."""
        self._devices.pop(node, None)
        for deployment, assigned in list(self._assigned.items()):
            if assigned.devices[0].node == node:
                del self._assigned[deployment]
                self._remembered[deployment] = tuple(one.device for one in assigned.devices)
        self._refused = {
            name: refusal for name, refusal in self._refused.items() if refusal[0] != node
        }

    def _believed(self, node: NodeId, devices: Iterable[Device]) -> tuple[Device, ...]:
        """What an agent reports, without devices of other nodes and without repetitions."""
        claimed = self._hardware_of_others(node)
        found: dict[DeviceId, Device] = {}
        for device in devices:
            if device.node == node and device.hardware not in claimed:
                found.setdefault(device.device, device)
                if device.hardware:
                    claimed[device.hardware] = device
        return tuple(found.values())

    def _hardware_of_others(self, node: NodeId) -> dict[str, Device]:
        return {
            device.hardware: device
            for other, devices in self._devices.items()
            for device in devices
            if other != node and device.hardware
        }

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        here = {device.device: device for mine in self._devices.values() for device in mine}
        hardware = [device.hardware for device in here.values() if device.hardware]
        assert len(hardware) == len(set(hardware)), f"two nodes have one device: {hardware}"
        for deployment, assigned in self._assigned.items():
            devices = assigned.devices
            assert len({one.device for one in devices}) == len(devices) > 0, f"{deployment}"
            assert len({one.node for one in devices}) == 1, f"{deployment} spans nodes"
            assert all(here.get(one.device) == one for one in devices), f"{deployment}: gone"
        for device, owners in self._owner_table().items():
            groups = {self._assigned[owner].group for owner in owners}
            shared = len(groups) == 1 and "" not in groups
            assert len(owners) == 1 or shared, f"{device} is owned by {owners}"


def _by_place(devices: Iterable[Device], *, within_domain: bool) -> list[list[Device]]:
    """Devices by node, or by link domain of a node."""
    places: dict[tuple[NodeId, str], list[Device]] = defaultdict(list)
    for device in devices:
        places[device.node, device.domain if within_domain else ""].append(device)
    return [places[place] for place in sorted(places)]
