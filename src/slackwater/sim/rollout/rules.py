"""The rules that are compared with each other, by name: which policies make up each."""

from slackwater.control.rollout.settings import RolloutSettings
from slackwater.policy.balancing import BalancingPolicy, EvenSteps, FillIdle, NoBalancing
from slackwater.policy.routing import (
    CacheAffine,
    LeastLoaded,
    PinnedTrajectory,
    RoundRobin,
    RoutingPolicy,
    ShortestQueue,
)
from slackwater.policy.seeding import AdaptiveWindow, BalancedFinish, Colocated, SeedingPolicy
from slackwater.policy.warm_routing import KeepWarm

WATCH_S = 5.0


def _spot(seeding: SeedingPolicy, balancing: BalancingPolicy) -> RolloutSettings:
    """One long turn a trajectory: no prefix to return to, so all join the shortest queue."""
    return RolloutSettings(
        routing=ShortestQueue(),
        balancing=balancing,
        seeding=seeding,
        watch_every_s=WATCH_S,
        balance_every_s=WATCH_S,
        turn_timeout_s=1e6,
        stall_s=1e6,
        lease_s=30.0,
    )


SPOT_RULES: dict[str, RolloutSettings] = {
    "colocated": _spot(Colocated(), FillIdle()),
    "rlboost": _spot(AdaptiveWindow(), FillIdle()),
    "seeding_off": _spot(AdaptiveWindow(seeds=False), FillIdle()),
    "memory_off": _spot(AdaptiveWindow(remembers=False), FillIdle()),
    "ours": _spot(BalancedFinish(), EvenSteps()),
}


def _agents(routing: RoutingPolicy, balancing: BalancingPolicy | None = None) -> RolloutSettings:
    return RolloutSettings(
        routing=routing,
        balancing=balancing or NoBalancing(),
        patience_s=600.0,
        borrowed_stall_s=1e6,
        watch_every_s=2 * WATCH_S,
        turn_timeout_s=1e7,
        stall_s=1e6,
        lease_s=30.0,
    )


AGENT_RULES: dict[str, RolloutSettings] = {
    "pinned": _agents(PinnedTrajectory()),
    "round_robin": _agents(RoundRobin()),
    "turn_wise": _agents(LeastLoaded()),
    "affinity": _agents(CacheAffine()),
    "ours": _agents(KeepWarm()),
    "rlboost": _agents(ShortestQueue(), FillIdle()),
    "elastic": _agents(KeepWarm(), EvenSteps()),
}
