"""Identifiers. Distinct types, so that a node is never passed for a job.

What a tenant names is `NAME@TENANT`, snapshots go by a digest. Neither name has an `@`, so two
tenants never share an id; who owns something is stored with it, and checked there.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import NewType

from slackwater.model.errors import ConfigError

_GIVEN = re.compile(r"(ac|en)-[0-9a-f]{24}")  # ids that the service gives
_TENANT = re.compile(r"(?!\.+$)[A-Za-z0-9_.-]{1,64}")


JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
DeviceId = NewType("DeviceId", str)
DeploymentId = NewType("DeploymentId", str)
GroupId = NewType("GroupId", str)
InstanceId = NewType("InstanceId", str)
TurnId = NewType("TurnId", str)
TrajectoryId = NewType("TrajectoryId", str)
TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)
ModelId = NewType("ModelId", str)
RequestId = NewType("RequestId", str)
SamplingSessionId = NewType("SamplingSessionId", str)
WorkerId = NewType("WorkerId", str)
ActionId = NewType("ActionId", str)
EnvironmentId = NewType("EnvironmentId", str)
ResourceName = NewType("ResourceName", str)
ServiceName = NewType("ServiceName", str)

NOBODY = TenantId("")  # the owner where there are no tenants


def check_tenant(name: str, field: str) -> TenantId:
    if not _TENANT.fullmatch(name):
        fix = "must be 1-64 letters, digits, . _ - and not dots alone"
        raise ConfigError.of(field, name, fix)
    return TenantId(name)


def owned_id(tenant: TenantId, name: str, field: str) -> str:
    """The id of the tenant's `name`; refuses a name that could be read as another id."""
    if _GIVEN.fullmatch(name) or name.startswith(f"{tenant}.") or "@" in name:
        fix = f"could be the id of another one; take a name without '{tenant}.' in front"
        raise ConfigError.of(field, name, fix)
    return f"{name}@{tenant}"


def resolve_id(tenant: TenantId, given: str) -> str:
    """The id meant by a whole id, an own name, or an id of version 0.1 (`TENANT.NAME`)."""
    if "@" in given or _GIVEN.fullmatch(given):
        return given
    return f"{given.removeprefix(f'{tenant}.')}@{tenant}"


def snapshot_id(tenant: TenantId, name: str) -> str:
    """A snapshot's file name on its node, the same for the same owner and name."""
    return "sn-" + hashlib.sha256(f"{tenant}/{name}".encode()).hexdigest()[:40]


def old_snapshot_id(tenant: TenantId, name: str, tenants: Iterable[str]) -> str | None:
    """Its name in version 0.1; None if another tenant may have kept its own under it."""
    kept_as = f"{tenant}.{name}"
    others = (other for other in tenants if other != tenant)
    return None if any(kept_as.startswith(f"{other}.") for other in others) else kept_as
