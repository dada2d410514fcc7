"""The registry of environment snapshots: owner, name and node of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.model.ids import NodeId, TenantId, old_snapshot_id, snapshot_id
from slackwater.model.tenant_limits import TenantLimits


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that a tenant keeps on one node under a name of its own."""

    tenant: TenantId
    name: str
    node: NodeId
    size_bytes: int = 0

    @property
    def stored_name(self) -> str:
        """Its name on its node, which differs between tenants."""
        return snapshot_id(self.tenant, self.name)


class SnapshotRegistry:
    """`tenants`, past ones too: a snapshot of version 0.1 has no owner and may be any one's."""

    def __init__(self, tenants: Sequence[str] = ()) -> None:
        self._tenants = tuple(tenants)
        self._snapshots: dict[tuple[TenantId, str, NodeId], Snapshot] = {}

    def add(self, snapshot: Snapshot) -> bool:
        """Register a snapshot; return whether it is new."""
        key = (snapshot.tenant, snapshot.name, snapshot.node)
        is_new = key not in self._snapshots
        self._snapshots.setdefault(key, snapshot)
        return is_new

    def set_size(self, snapshot: Snapshot, size_bytes: int) -> Snapshot:
        """Record the size that the node measured."""
        key = (snapshot.tenant, snapshot.name, snapshot.node)
        found = self._snapshots[key] = replace(snapshot, size_bytes=size_bytes)
        return found

    def remove(self, snapshot: Snapshot) -> None:
        self._snapshots.pop((snapshot.tenant, snapshot.name, snapshot.node), None)

    def room_bytes(self, snapshot: Snapshot, limits: TenantLimits) -> int:
        """The most bytes that it may take; raises RefusedError if the tenant may keep no more."""
        key = (snapshot.tenant, snapshot.name, snapshot.node)
        replaced = self._snapshots.get(key)
        others = [each for each in self._snapshots_of(snapshot.tenant) if each is not replaced]
        if len(others) >= limits.snapshots:
            raise RefusedError(
                f"snapshot: tenant {snapshot.tenant} has {len(others)} snapshots, as many as the "
                "operator lets it ([limits] snapshots)"
            )
        left = (limits.snapshot_mib << 20) - sum(each.size_bytes for each in others)
        if left <= 0:
            raise RefusedError(
                f"snapshot: tenant {snapshot.tenant} keeps {limits.snapshot_mib} MiB of snapshots, "
                "as much as the operator lets it ([limits] snapshot_mib)"
            )
        return left

    def _snapshots_of(self, tenant: TenantId) -> list[Snapshot]:
        return [snapshot for snapshot in self._snapshots.values() if snapshot.tenant == tenant]

    def find_stored_name(self, tenant: TenantId, name: str) -> str:
        """The name of a tenant's snapshot on its node; raises NotFoundError if there is none.

        A snapshot of version 0.1 is found only if no other tenant can own it.
        """
        if any(snapshot.name == name for snapshot in self._snapshots_of(tenant)):
            return snapshot_id(tenant, name)
        found = old_snapshot_id(tenant, name, self._tenants)
        if found is None:
            raise NotFoundError(
                f"snapshot: {name!r} is not one of yours, or was kept by a version that did not "
                "store its owner; take it again"
            )
        return found
