"""Limits on each tenant's use of the sandboxes and of the disk for checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from slackwater.model.action import ActionSpec, EnvironmentSpec
from slackwater.model.amounts import CORES, MEMORY_MIB
from slackwater.model.config import decode, plain
from slackwater.model.errors import ConfigError
from slackwater.model.ids import TenantId, check_tenant

_MIB = 1 << 20
_SHARED_MEMORY = 0.5  # of the nodes' memory, for each of several tenants
_SHARED_CORES = 0.9  # of a node's cores: the rest runs other tenants' short actions at once
_SHARED_DISK = 0.5  # of the disk with the service's state
_SHARES = ("memory_share", "core_share", "checkpoint_share")
_MAY_BE_0 = ("environments", "snapshots", "snapshot_mib")
_MOST = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits on one action or environment, then on all of a tenant's, then its `weight`.

    Defaults of `waiting_actions`, `network` and the shares depend on how many tenants there are.
    """

    memory_mib: int = 16_384
    disk_mib: int = 16_384
    cores: int = 4096
    limit_s: float = 3600.0
    processes: int = 1024
    output_bytes: int = 16 * _MIB
    priority: int = 1000
    network: bool | None = None
    waiting_actions: int | None = None
    environments: int = 4096
    snapshots: int = 256
    snapshot_mib: int = 65_536
    memory_share: float | None = None
    core_share: float | None = None
    checkpoint_share: float | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        for each in fields(TenantLimits):
            value = getattr(self, each.name)
            least = 0 if each.name in _MAY_BE_0 else 1
            if each.name in _SHARES:
                if value is not None and not 0 < value <= 1:
                    raise ConfigError.of(each.name, value, "must be above 0 and at most 1")
            elif each.name in ("weight", "limit_s"):
                if not 0 < value <= _MOST:
                    raise ConfigError.of(each.name, value, "must be above 0 and finite")
            elif isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise ConfigError.of(each.name, value, f"must be at least {least}")

    def memory_of(self, total_mib: int) -> int:
        """How much of the nodes' memory the tenant may hold."""
        share = self.memory_share
        return total_mib if share is None or share >= 1 else int(total_mib * share)

    def checkpoint_bytes(self, disk_bytes: int) -> int | None:
        """How much of that disk the tenant's checkpoints may take, `None` for all of it."""
        share = self.checkpoint_share
        return None if share is None or share >= 1 else int(disk_bytes * share)

    def cores_of(self, total: int) -> int:
        """How many of a node's cores the tenant may hold, at least one."""
        share = self.core_share
        return total if share is None or share >= 1 else max(int(total * share), 1)


@dataclass(frozen=True, slots=True)
class TenantTable:
    """The limits of every tenant, `default` for one that is not named."""

    default: TenantLimits = field(default_factory=TenantLimits)
    named: Mapping[str, TenantLimits] = field(default_factory=dict)

    def limits_of(self, tenant: TenantId) -> TenantLimits:
        return self.named.get(tenant, self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLimits(TenantLimits):
    """`[limits]` of a service's configuration, with overrides under `[limits.tenants.NAME]`."""

    tenants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TenantLimits.__post_init__(self)
        for name in self.tenants:
            check_tenant(name, "limits.tenants")
            self.limits_of(name)

    def limits_of(self, name: str) -> TenantLimits:
        """One tenant's limits as configured, without defaults that depend on other tenants."""
        common = {key: value for key, value in plain(self).items() if key != "tenants"}
        own = self.tenants.get(name, {})
        return decode(TenantLimits, common | dict(own), f"limits.tenants.{name}")

    def table(self, tenants: Sequence[str], operator: str, max_waiting: int) -> TenantTable:
        """With the defaults that depend on the tenants: a single tenant may hold everything."""
        named = {
            name: self._fill_defaults(name, tenants, operator, max_waiting) for name in tenants
        }
        return TenantTable(self._fill_defaults("", tenants, operator, max_waiting), named)

    def _fill_defaults(
        self, name: str, tenants: Sequence[str], operator: str, max_waiting: int
    ) -> TenantLimits:
        found, several = self.limits_of(name), len(tenants) > 1
        defaults: dict[str, Any] = {
            "network": name == operator,
            "waiting_actions": max(max_waiting // max(len(tenants), 1), 1),
            "memory_share": _SHARED_MEMORY if several else 1.0,
            "core_share": _SHARED_CORES if several else 1.0,
            "checkpoint_share": _SHARED_DISK if several else 1.0,
        }
        missing = {key: value for key, value in defaults.items() if getattr(found, key) is None}
        return replace(found, **missing)


def check_ceilings(tenant: TenantId, limits: TenantLimits, asked: Mapping[str, float]) -> None:
    """Raise for the first field above its ceiling, such as `limits.disk_mib` above `disk_mib`."""
    for path, value in asked.items():
        name = path.rpartition(".")[2]
        ceiling = getattr(limits, name)
        if value > ceiling:
            fix = f"must be at most {ceiling}: the operator's limit for tenant {tenant or '-'} "
            raise ConfigError.of(path, value, f"{fix}([limits] {name})")


def check_network(tenant: TenantId, limits: TenantLimits, network: bool) -> None:
    if network and not limits.network:
        fix = f"must be false: the operator grants tenant {tenant} no network ([limits] network)"
        raise ConfigError.of("limits.network", network, fix)


def check_action(spec: ActionSpec, limits: TenantLimits) -> None:
    asked: dict[str, float] = {"priority": abs(spec.priority)}
    cores, memory = spec.need(CORES), spec.need(MEMORY_MIB)
    if cores is not None:
        asked["cores"] = cores.amounts.most
    if memory is not None:
        asked["limits.memory_mib"] = memory.amounts.most
    if spec.limit_s is not None:
        asked["limit_s"] = spec.limit_s
    check_ceilings(spec.tenant, limits, asked)


def check_environment(spec: EnvironmentSpec, limits: TenantLimits) -> None:
    asked = {"memory_mib": spec.memory_mib, "priority": abs(spec.priority)}
    check_ceilings(spec.tenant, limits, asked)
