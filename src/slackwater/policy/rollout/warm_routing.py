"""Where a turn goes when its prefix is worth more than a free slot: routing that keeps
caches warm.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.routing import WAIT, Destination, TurnNeed, affine_load


@dataclass(frozen=True, slots=True)
class KeepWarm:
    """Trajectories return to the instance that holds their prefix; new ones start where their
    prefix will last.

    Affinity alone (ROSE 4.3) goes elsewhere whenever home is full, and starts new trajectories
    wherever a slot is free; then contexts push each other out of the caches and every turn is
    prefilled again. Here a turn waits for its home, unless another instance is so empty
    (`idle_share` of its slots in use) that a prefill there costs less; and a new trajectory starts
    only where the contexts of those at home, with room to grow (`growth`), still fit. A home whose
    steps take more than `slow_home` times as long is left for such an instance: decoding there
    would cost more than the prefill.
    """

    growth: float = 1.5
    idle_share: float = 0.5
    slow_home: float = 1.5
    warm_first: bool = True

    def place(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination:
        home = affine_load(need, eligible)
        goes_home = home is not None and self.takes(need, home)
        if home is not None and goes_home and home.slowness <= self.slow_home * _fastest(eligible):
            return Destination(home.instance)
        best = min(
            (load for load in eligible if self.takes(need, load)),
            key=lambda load: (not load.owned, load.in_flight * load.slowness, load.instance),
            default=None,
        )
        if home is not None and goes_home and best is not None:
            slower = home.slowness > self.slow_home * best.slowness
            best = best if slower else home
        return WAIT if best is None else Destination(best.instance)

    def takes(self, need: TurnNeed, load: InstanceLoad) -> bool:
        if not load.runs_now(need.context_tokens):
            return False
        if need.affine == load.instance or load.in_flight == 0:
            return True
        held = max(load.homed_tokens, load.kv_load_tokens)
        if held + self.growth * need.context_tokens > load.kv_tokens:
            return False
        return need.cached_tokens == 0 or load.in_flight < self.idle_share * load.max_running


def _fastest(eligible: Sequence[InstanceLoad]) -> float:
    return min(load.slowness for load in eligible)
