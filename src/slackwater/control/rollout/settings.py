"""Settings of the rollout manager."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slackwater.model.config import decode
from slackwater.model.errors import ConfigError, check_above_zero, check_not_negative
from slackwater.policy.rollout.balanced_finish import BalancedFinish
from slackwater.policy.rollout.balancing import BalancingPolicy, EvenSteps
from slackwater.policy.rollout.catalogue import POLICIES, decode_policy
from slackwater.policy.rollout.routing import RoutingPolicy
from slackwater.policy.rollout.seeding import SeedingPolicy
from slackwater.policy.rollout.warm_routing import KeepWarm

_FORMER_NAMES = {"barren_losses": "max_losses_without_progress"}


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Policies, and the limits that bound every wait.

    `lease_s`: an instance silent for longer is lost. `stall_s`: turns leave an instance that makes
    no token for this long (`borrowed_stall_s` for borrowed ones, ROSE 4.1).
    `max_losses_without_progress`: a turn that loses more instances in a row without a new token
    fails. `home_lease_s`: a trajectory that pauses for longer counts as ended, or sooner where its
    job's trajectories pause for less. `move_rest_s`: least time between two balancing moves of a
    turn. `trainer_patience_s`: how long local engines may keep devices from a trainer with work.
    `faults_allowed`: an instance with more faults is released. `kept_for_others`: the share of
    each instance that an owner's turns leave free while they hold more than that share there, so
    that one owner's long turns never block another's first turn; only with several owners.
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
    max_losses_without_progress: int = 8
    faults_allowed: int = 3
    home_lease_s: float = 60.0
    trainer_patience_s: float = 60.0
    move_rest_s: float = 15.0
    remembered_trajectories: int = 100_000
    kept_for_others: float = 0.125

    def __post_init__(self) -> None:
        times = ("lease_s", "stall_s", "borrowed_stall_s", "turn_timeout_s", "watch_every_s")
        check_above_zero("rollout: ", self, *times, "balance_every_s")
        pauses = ("home_lease_s", "trainer_patience_s", "move_rest_s")
        check_not_negative("rollout: ", self, *pauses, "faults_allowed")
        check_above_zero("rollout: ", self, "max_losses_without_progress")
        check_above_zero("rollout: ", self, "remembered_trajectories")
        if not 0 <= self.kept_for_others < 1:
            raise ConfigError.of(
                "rollout: kept_for_others", self.kept_for_others, "must be from 0 to below 1"
            )


def rollout_settings(table: Mapping[str, Any], at: str = "rollout") -> RolloutSettings:
    """From a table: policies by name (`routing = "affinity"`) or as tables, limits by name."""
    table = {_FORMER_NAMES.get(name, name): value for name, value in table.items()}
    made = {
        name: decode_policy(name, table[name], f"{at}.{name}") for name in POLICIES if name in table
    }
    return decode(RolloutSettings, table, at, made)
