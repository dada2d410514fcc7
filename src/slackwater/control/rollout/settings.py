"""What an operator can set of the rollout manager."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slackwater.model.config import decode
from slackwater.model.errors import ConfigError
from slackwater.policy.rollout.balanced_finish import BalancedFinish
from slackwater.policy.rollout.balancing import BalancingPolicy, EvenSteps
from slackwater.policy.rollout.catalogue import POLICIES, chosen
from slackwater.policy.rollout.routing import RoutingPolicy
from slackwater.policy.rollout.seeding import SeedingPolicy
from slackwater.policy.rollout.warm_routing import KeepWarm


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Policies, and the limits that make sure that nothing waits for ever.

    `lease_s`: an instance not heard for so long is gone. `stall_s`: turns leave an instance that
    runs some and makes no token for so long (`borrowed_stall_s` for borrowed ones, ROSE 4.1).
    `barren_losses`: a turn whose instances vanish so often without one token of progress fails.
    `home_lease_s`: a trajectory that does not return for so long is taken to have ended, or sooner
    where its job's trajectories pause for less. `move_rest_s`: a running turn is not moved again by
    balancing for so long. `trainer_patience_s`: so long may local engines keep a trainer that has
    work from its devices. `faults_allowed`: an instance that lies more often is released.
    `kept_for_others`: of every instance, an owner of turns leaves this share free, unless it has
    less than that there itself: so that one owner's long turns never keep another's first turn
    waiting. It holds where more than one owner was named.
    """

    routing: RoutingPolicy = field(default_factory=KeepWarm)
    balancing: BalancingPolicy = field(default_factory=EvenSteps)
    seeding: SeedingPolicy = field(default_factory=BalancedFinish)
    lease_s: float = 10.0
    stall_s: float = 60.0
    borrowed_stall_s: float = 2.0
    turn_timeout_s: float = 3600.0
    watch_every_s: float = 1.0
    balance_every_s: float = 1.0
    barren_losses: int = 8
    faults_allowed: int = 3
    home_lease_s: float = 60.0
    trainer_patience_s: float = 60.0
    move_rest_s: float = 15.0
    remembered_trajectories: int = 100_000
    kept_for_others: float = 0.125

    def __post_init__(self) -> None:
        for name in ("lease_s", "stall_s", "borrowed_stall_s", "turn_timeout_s", "watch_every_s"):
            if getattr(self, name) <= 0:
                raise ConfigError.of(f"rollout: {name}", getattr(self, name), "must be above 0")
        if not 0 <= self.kept_for_others < 1:
            raise ConfigError.of(
                "rollout: kept_for_others", self.kept_for_others, "must be from 0 to below 1"
            )


def rollout_settings(table: Mapping[str, Any], at: str = "rollout") -> RolloutSettings:
    """From a table: policies by name (`routing = "affinity"`) or as tables, limits by name."""
    made = {name: chosen(name, table[name], f"{at}.{name}") for name in POLICIES if name in table}
    return decode(RolloutSettings, table, at, made)
