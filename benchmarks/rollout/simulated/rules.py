"""The rules that are compared with each other, by name: which policies make up each.

"ours" is `RolloutSettings` as it comes, the policies that a live service runs with; the others
name theirs.
"""

from dataclasses import replace

from slackwater.control.rollout.settings import RolloutSettings
from slackwater.policy.rollout.balanced_finish import BalancedFinish
from slackwater.policy.rollout.balancing import FillIdle, NoBalancing
from slackwater.policy.rollout.routing import (
    CacheAffine,
    LeastLoaded,
    PinnedTrajectory,
    RoundRobinRouting,
    RoutingPolicy,
    ShortestQueue,
)
from slackwater.policy.rollout.seeding import AdaptiveWindow, ColocatedSeeding, SeedingPolicy

WATCH_S = 5.0

# One long turn a trajectory, nothing ever stalls or times out.
_SPOT = RolloutSettings(
    watch_every_s=WATCH_S,
    balance_every_s=WATCH_S,
    turn_timeout_s=1e6,
    stall_s=1e6,
    lease_s=30.0,
)


def _rlboost(seeding: SeedingPolicy) -> RolloutSettings:
    return replace(_SPOT, routing=ShortestQueue(), balancing=FillIdle(), seeding=seeding)


SPOT_RULES: dict[str, RolloutSettings] = {
    "colocated": _rlboost(ColocatedSeeding()),
    "rlboost": _rlboost(AdaptiveWindow()),
    "rlboost_seeding_off": _rlboost(AdaptiveWindow(seeds=False)),
    "rlboost_memory_off": _rlboost(AdaptiveWindow(remembers=False)),
    "ours": _SPOT,
    "ours_seeding_off": replace(_SPOT, seeding=BalancedFinish(seeds=False)),
    "ours_memory_off": replace(_SPOT, seeding=BalancedFinish(remembers=False)),
}

_AGENTS = RolloutSettings(
    borrowed_stall_s=1e6,
    turn_timeout_s=1e7,
    stall_s=1e6,
    lease_s=30.0,
)


def _routed(routing: RoutingPolicy) -> RolloutSettings:
    return replace(_AGENTS, routing=routing, balancing=NoBalancing())


AGENT_RULES: dict[str, RolloutSettings] = {
    "pinned": _routed(PinnedTrajectory()),
    "round_robin": _routed(RoundRobinRouting()),
    "turn_wise": _routed(LeastLoaded()),
    "affinity": _routed(CacheAffine()),
    "rlboost": replace(_AGENTS, routing=ShortestQueue(), balancing=FillIdle()),
    "ours": _AGENTS,
}
