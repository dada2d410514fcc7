"""The device allocator: which deployment owns which devices.

A deployment gets all the devices that it requests or none, on one node, and within one link domain
if one has room. A device has one owner; only deployments of one sharing group, which alternate by
permits, may own the same one. A deployment that returns after its node or the control plane was
lost gets its former devices, if they are still there.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slackwater.control.devices import messages
from slackwater.model.device import DeploymentRequest, Device
from slackwater.model.ids import DeploymentId, DeviceId, NodeId

OwnerTable: TypeAlias = dict[DeviceId, list[DeploymentId]]
NamedDevice: TypeAlias = tuple[DeviceId, Device]
_OWNERS_NAMED = 8  # in an error message; a large fleet has thousands


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """The devices of a deployment, in the order of its ranks."""

    devices: tuple[Device, ...]
    group: str


class DeviceAllocator:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self) -> None:
        # By id, which is computed once: every allocation looks at all devices of the fleet.
        self._devices: dict[NodeId, dict[DeviceId, Device]] = {}
        self._owners: OwnerTable = {}
        self._free: dict[NodeId, int] = {}
        self._assigned: dict[DeploymentId, DeviceAssignment] = {}
        self._remembered: dict[DeploymentId, tuple[DeviceId, ...]] = {}

    def handle(self, event: messages.AllocationEvent) -> Sequence[messages.AllocationCommand]:
        match event:
            case messages.DevicesReported(_, node, devices):
                self._forget_node(node)
                self._devices[node] = self._accept_reported(node, devices)
                self._free[node] = len(self._devices[node])
            case messages.DevicesLost(_, node):
                self._forget_node(node)
            case messages.DeploymentsRequested(_, requests):
                return [self._allocate(request) for request in requests]
            case messages.DeploymentReleased(_, deployment):
                self._release(deployment)
                self._remembered.pop(deployment, None)
            case messages.AssignmentsRestored(_, assignments):
                self._remembered |= assignments
        return ()

    # ---- queries ----
    def conflict(self, node: NodeId, devices: Iterable[Device]) -> str | None:
        """Why the node cannot have these devices, or None: another node has reported one."""
        claimed = self._hardware_of_others(node)
        for device in devices:
            if (other := claimed.get(device.hardware)) is not None:
                return (
                    f"node {node}: {device.device} ({device.hardware}) is already "
                    f"{other.device}; give every node GPUs of its own with --gpu-ids"
                )
        return None

    def devices(self, node: NodeId) -> tuple[Device, ...]:
        return tuple(self._devices.get(node, {}).values())

    def owners(self, device: DeviceId) -> list[DeploymentId]:
        return list(self._owners.get(device, ()))

    def assignments(self) -> dict[DeploymentId, tuple[DeviceId, ...]]:
        """Devices by deployment, to be restored by a new control plane."""
        held = {
            deployment: tuple(device.device for device in assigned.devices)
            for deployment, assigned in self._assigned.items()
        }
        return self._remembered | held

    def has_room(self, node: NodeId, kind: str, devices: int = 1) -> bool:
        """Whether so many devices of the kind are free on the node; its only one can be shared."""
        held = self._devices.get(node, {})
        mine = [name for name, device in held.items() if device.kind == kind]
        free = sum(name not in self._owners for name in mine)
        return free >= devices or len(mine) == devices == 1

    # ---- decisions ----
    def _allocate(self, request: DeploymentRequest) -> messages.AllocationCommand:
        deployment = request.deployment
        if (held := self._assigned.get(deployment)) is not None:
            return messages.StartDeployment(deployment, held.devices)
        usable = [
            (name, device)
            for name, device in self._eligible(request, self._roomy_nodes(request))
            if name not in self._owners or self._may_share(self._owners[name], request)
        ]
        chosen = self._restore_previous(request, usable) or self._choose(request, usable)
        if chosen is None:
            return messages.RefuseDeployment(deployment, self._reason(request))
        self._remembered.pop(deployment, None)
        self._assigned[deployment] = DeviceAssignment(chosen, request.group)
        for device in chosen:
            self._owners.setdefault(device.device, []).append(deployment)
            self._free[device.node] -= len(self._owners[device.device]) == 1
        return messages.StartDeployment(deployment, chosen)

    def _nodes(self, request: DeploymentRequest) -> list[NodeId]:
        return sorted(self._devices) if request.node is None else [request.node]

    def _roomy_nodes(self, request: DeploymentRequest) -> list[NodeId]:
        """Nodes with enough devices: a deployment without a sharing group needs free ones."""
        needed = 0 if request.group else request.devices
        return [node for node in self._nodes(request) if self._free.get(node, 0) >= needed]

    def _devices_of_kind(
        self, request: DeploymentRequest, nodes: Iterable[NodeId]
    ) -> list[NamedDevice]:
        return [
            named
            for node in nodes
            for named in self._devices.get(node, {}).items()
            if named[1].kind == request.kind
        ]

    def _eligible(self, request: DeploymentRequest, nodes: Iterable[NodeId]) -> list[NamedDevice]:
        return [
            named
            for named in self._devices_of_kind(request, nodes)
            if not named[1].memory_mb or named[1].memory_mb >= request.memory_mb
        ]

    def _may_share(self, owners: Sequence[DeploymentId], request: DeploymentRequest) -> bool:
        """Whether the new deployment alternates with all owners of a device."""
        groups = {self._assigned[owner].group for owner in owners}
        return request.group != "" and groups == {request.group}

    def _restore_previous(
        self, request: DeploymentRequest, usable: Sequence[NamedDevice]
    ) -> tuple[Device, ...] | None:
        before = self._remembered.get(request.deployment, ())
        if len(before) != request.devices:
            return None
        known = dict(usable)
        if not all(name in known for name in before):
            return None
        return tuple(known[name] for name in before)

    def _choose(
        self, request: DeploymentRequest, usable: Sequence[NamedDevice]
    ) -> tuple[Device, ...] | None:
        """Devices of its group if there are enough, else of one link domain, else of one node. The
        smallest place that fits is chosen, and devices that no lost deployment will want first.
        """
        expected = {name for names in self._remembered.values() for name in names}
        count, owners = request.devices, self._owners
        ranked = sorted(
            usable, key=lambda device: (device[0] in expected, len(owners.get(device[0], ())))
        )
        owned = [named for named in ranked if named[0] in owners]
        for devices, within_domain in ((owned, False), (ranked, True), (ranked, False)):
            groups = _group_by_location(devices, within_domain=within_domain)
            fitting = sorted((group for group in groups if len(group) >= count), key=len)
            if fitting:
                chosen = min(
                    (group[:count] for group in fitting),
                    key=lambda group: sum(name in expected for name, _ in group),
                )
                return tuple(device for _, device in chosen)
        return None

    def _reason(self, request: DeploymentRequest) -> str:
        nodes = self._nodes(request)
        count, found = request.devices, self._devices_of_kind(request, nodes)
        where = "any node" if request.node is None else f"node {request.node}"
        needs = f"{request.deployment} needs {count} {request.kind} device{'s' * (count > 1)}"
        most = max(map(len, _group_by_location(found, within_domain=False)), default=0)
        if most < count:
            return f"{needs}; the most of {where} is {most}"
        largest = max(device.memory_mb for _, device in found)
        if len(self._eligible(request, nodes)) < count:
            return (
                f"{needs} of {request.memory_mb} MiB each; the largest of {where} has {largest} "
                "MiB: spread the model over more devices, such as tp=2"
            )
        owned = [name for name, _ in found if name in self._owners]
        held = [f"{name} by {self._owners[name][0]}" for name in owned[:_OWNERS_NAMED]]
        if len(owned) > len(held):
            held.append(f"and {len(owned) - len(held)} more")
        return f"{needs}; of {where} are owned {', '.join(held)}: start fewer deployments"

    # ---- bookkeeping ----
    def _release(self, deployment: DeploymentId) -> tuple[Device, ...]:
        """End a deployment's ownership; return its devices."""
        assigned = self._assigned.pop(deployment, None)
        if assigned is None:
            return ()
        for device in assigned.devices:
            owners = self._owners[device.device]
            owners.remove(deployment)
            if not owners:
                del self._owners[device.device]
                self._free[device.node] += 1
        return assigned.devices

    def _forget_node(self, node: NodeId) -> None:
        """Remove a node. Its deployments get the same devices when they return."""
        for deployment, assigned in list(self._assigned.items()):
            if assigned.devices[0].node == node:
                released = self._release(deployment)
                self._remembered[deployment] = tuple(device.device for device in released)
        self._devices.pop(node, None)
        self._free.pop(node, None)

    def _accept_reported(self, node: NodeId, devices: Iterable[Device]) -> dict[DeviceId, Device]:
        """The reported devices without those of other nodes and duplicates."""
        claimed = self._hardware_of_others(node)
        found: dict[DeviceId, Device] = {}
        for device in devices:
            if device.node == node and device.hardware not in claimed:
                found.setdefault(device.device, device)
                if device.hardware:
                    claimed[device.hardware] = device
        return found

    def _hardware_of_others(self, node: NodeId) -> dict[str, Device]:
        return {
            device.hardware: device
            for other, devices in self._devices.items()
            for device in devices.values()
            if other != node and device.hardware
        }

    def check_integrity(self) -> None:
        here = {name: device for mine in self._devices.values() for name, device in mine.items()}
        hardware = [device.hardware for device in here.values() if device.hardware]
        assert len(hardware) == len(set(hardware)), f"two nodes have one device: {hardware}"
        for deployment, assigned in self._assigned.items():
            devices = assigned.devices
            assert len({device.device for device in devices}) == len(devices) > 0, f"{deployment}"
            assert len({device.node for device in devices}) == 1, f"{deployment} spans nodes"
            assert all(here.get(device.device) == device for device in devices), (
                f"{deployment}: gone"
            )
        table: OwnerTable = defaultdict(list)
        for deployment, assigned in self._assigned.items():
            for device in assigned.devices:
                table[device.device].append(deployment)
        assert table.keys() == self._owners.keys(), "owners are those of the assignments"
        for node, devices_here in self._devices.items():
            free = sum(name not in table for name in devices_here)
            assert self._free[node] == free, f"{node} has {free} free devices"
        for name, owners in table.items():
            assert sorted(owners) == sorted(self._owners[name]), f"{name}"
            groups = {self._assigned[owner].group for owner in owners}
            shared = len(groups) == 1 and "" not in groups
            assert len(owners) == 1 or shared, f"{name} is owned by {owners}"


def _group_by_location(
    devices: Iterable[NamedDevice], *, within_domain: bool
) -> list[list[NamedDevice]]:
    """Devices by node, or by link domain of a node."""
    groups: dict[tuple[NodeId, str], list[NamedDevice]] = defaultdict(list)
    for named in devices:
        device = named[1]
        groups[device.node, device.domain if within_domain else ""].append(named)
    return [groups[place] for place in sorted(groups)]
