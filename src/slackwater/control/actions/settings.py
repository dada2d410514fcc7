"""Settings of the action broker."""

from dataclasses import dataclass, field

from slackwater.model.errors import ConfigError, check_above_zero
from slackwater.model.tenant_limits import TenantTable
from slackwater.policy.actions.priced import PricedScheduling
from slackwater.policy.actions.scheduling import ActionOrder, ArrivalOrder, Scheduling


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """`max_waiting` and the tenants' limits bound the queue; actions beyond them are refused.

    If a stopped action has not ended after `stop_grace_s`, its owner is notified and its resources
    stay taken. Environments of the durable log must return with their worker within `return_s`.
    """

    scheduling: Scheduling = field(default_factory=PricedScheduling)
    order: ActionOrder = field(default_factory=ArrivalOrder)
    max_waiting: int = 100_000
    tenants: TenantTable = field(default_factory=TenantTable)
    stop_grace_s: float = 10.0
    limit_grace_s: float = 5.0
    return_s: float = 60.0
    guess_s: float = 1.0

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ConfigError.of("max_waiting", self.max_waiting, "must be 1 or more")
        check_above_zero("", self, "stop_grace_s", "limit_grace_s", "return_s", "guess_s")
