"""Rollout policies by the names that configuration files use. Add a policy by adding a line."""

from collections.abc import Mapping
from typing import Any

from slackwater.model.config import decode
from slackwater.model.errors import ConfigError
from slackwater.policy.rollout.balanced_finish import BalancedFinish
from slackwater.policy.rollout.balancing import EvenSteps, FillIdle, NoBalancing
from slackwater.policy.rollout.routing import (
    CacheAffine,
    LeastLoaded,
    PinnedTrajectory,
    RoundRobinRouting,
    ShortestQueue,
)
from slackwater.policy.rollout.seeding import AdaptiveWindow, ColocatedSeeding
from slackwater.policy.rollout.warm_routing import KeepWarm

POLICIES: Mapping[str, Mapping[str, type]] = {
    "routing": {
        "keep_warm": KeepWarm,
        "affinity": CacheAffine,
        "turn_wise": LeastLoaded,
        "shortest_queue": ShortestQueue,
        "pinned": PinnedTrajectory,
        "round_robin": RoundRobinRouting,
    },
    "balancing": {"even_steps": EvenSteps, "fill_idle": FillIdle, "none": NoBalancing},
    "seeding": {
        "balanced_finish": BalancedFinish,
        "adaptive_window": AdaptiveWindow,
        "colocated": ColocatedSeeding,
    },
}


def decode_policy(decision: str, table: object, at: str) -> Any:
    """Create the policy that `table` names: a name, or a table with the name and parameters."""
    given = {"name": table} if isinstance(table, str) else table
    if not isinstance(given, Mapping) or "name" not in given:
        raise ConfigError.of(at, table, 'must be a name, or a table with name = "..."')
    known = POLICIES[decision]
    if given["name"] not in known:
        fix = f"must be one of: {', '.join(known)}"
        raise ConfigError.of(f"{at}.name", given["name"], fix)
    parameters = {key: value for key, value in given.items() if key != "name"}
    return decode(known[given["name"]], parameters, at)
