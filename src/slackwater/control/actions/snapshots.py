"""Whose snapshots there are, and on which nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.model.ids import NodeId, TenantId, old_snapshot_id, snapshot_id
from slackwater.model.tenant_limits import TenantLimits


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one tenant keeps on one node under a name of its own."""

    tenant: TenantId
    name: str
    node: NodeId
    size_bytes: int = 0

    @property
    def kept_as(self) -> str:
        return snapshot_id(self.tenant, self.name)


class SnapshotRegistry:
    """`tenants` are all that ever existed: a snapshot of version 0.1 may belong to any of them."""

    def __init__(self, tenants: Sequence[str] = ()) -> None:
        self._tenants = tuple(tenants)
        self._held: dict[tuple[TenantId, str, NodeId], Snapshot] = {}

    def add(self, snapshot: Snapshot) -> bool:
        """Whether it is a new one."""
        key = (snapshot.tenant, snapshot.name, snapshot.node)
        is_new = key not in self._held
        self._held.setdefault(key, snapshot)
        return is_new

    def measured(self, snapshot: Snapshot, size_bytes: int) -> Snapshot:
        """Its node says how large it is."""
        key = (snapshot.tenant, snapshot.name, snapshot.node)
        found = self._held[key] = replace(snapshot, size_bytes=size_bytes)
        return found

    def remove(self, snapshot: Snapshot) -> None:
        self._held.pop((snapshot.tenant, snapshot.name, snapshot.node), None)

    def room_bytes(self, snapshot: Snapshot, limits: TenantLimits) -> int:
        """How large it may be; raises if the tenant may keep no more."""
        key = (snapshot.tenant, snapshot.name, snapshot.node)
        held = [one for one in self.of(snapshot.tenant) if self._held.get(key) is not one]
        if len(held) >= limits.snapshots:
            said = f"tenant {snapshot.tenant} has {len(held)} snapshots, as many as the operator "
            raise RefusedError(f"snapshot: {said}lets it ([limits] snapshots)")
        left = (limits.snapshot_mib << 20) - sum(one.size_bytes for one in held)
        if left <= 0:
            said = (
                f"tenant {snapshot.tenant} keeps {limits.snapshot_mib} MiB of snapshots, as much "
            )
            raise RefusedError(f"snapshot: {said}as the operator lets it ([limits] snapshot_mib)")
        return left

    def of(self, tenant: TenantId) -> list[Snapshot]:
        """A tenant's own."""
        return [snapshot for snapshot in self._held.values() if snapshot.tenant == tenant]

    def kept_as(self, tenant: TenantId, name: str) -> str:
        """Its name on its node. One of version 0.1 counts only if no other tenant can own it."""
        if any(snapshot.name == name for snapshot in self.of(tenant)):
            return snapshot_id(tenant, name)
        found = old_snapshot_id(tenant, name, self._tenants)
        if found is None:
            raise NotFoundError(
                f"snapshot: {name!r} is not one of yours, or was kept by a version that did not "
                "store its owner; take it again"
            )
        return found
