"""Whether what a tenant asks for is within what the operator lets it ask for."""

from collections.abc import Mapping

from slackwater.model.action import ActionSpec, EnvironmentSpec
from slackwater.model.amounts import CORES, MEMORY_MIB
from slackwater.model.errors import ConfigError
from slackwater.model.ids import TenantId
from slackwater.model.tenant_limits import TenantLimits


def check_ceilings(tenant: TenantId, limits: TenantLimits, asked: Mapping[str, float]) -> None:
    """Raise for the first field above its ceiling, such as `limits.disk_mib` above `disk_mib`."""
    for field, value in asked.items():
        name = field.rpartition(".")[2]
        ceiling = getattr(limits, name)
        if value > ceiling:
            fix = f"must be at most {ceiling}: the operator's limit for tenant {tenant or '-'} "
            raise ConfigError.of(field, value, f"{fix}([limits] {name})")


def check_network(tenant: TenantId, limits: TenantLimits, network: bool) -> None:
    if network and not limits.network:
        fix = f"must be false: the operator grants tenant {tenant} no network ([limits] network)"
        raise ConfigError.of("limits.network", network, fix)


def check_action(spec: ActionSpec, limits: TenantLimits) -> None:
    """What of an action the broker sees."""
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
