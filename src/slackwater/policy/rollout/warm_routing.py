"""Routing that keeps caches warm: a turn's prefix is worth more than a free slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.routing import WAIT, Destination, TurnNeed, find_affine


@dataclass(frozen=True, slots=True)
class KeepWarm:
    """Trajectories return to the instance that holds their prefix; new ones start where it will
    last.

    Affinity alone (ROSE 4.3) goes elsewhere whenever home is full, so that contexts push each other
    out of the caches. Here a trajectory of a working set waits for its home, and any other starts
    only where the working set with its expected growth still fits. A home `slow_home` times as slow
    is left for a faster instance: decoding there would cost more than the prefill.
    """

    slow_home: float = 1.5
    started_first: bool = True

    def place(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination:
        home = find_affine(need, eligible)
        if home is None:
            return self._least_loaded(need, eligible)
        if home.slowness > self.slow_home * min(load.slowness for load in eligible):
            faster = [one for one in eligible if home.slowness > self.slow_home * one.slowness]
            best = self._least_loaded(need, faster)
            if best.instance is not None:
                return best
        if self.can_take(need, home):
            return Destination(home.instance)
        if need.resident:
            return Destination(bound_to=home.instance)
        return self._least_loaded(need, eligible)

    def _least_loaded(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination:
        best, least, owned = None, inf, True
        for load in eligible:  # with many instances this loop is what a decision costs
            in_flight = load.in_flight
            if in_flight >= load.max_running:
                continue
            if load.owned is not owned:
                if best is not None:
                    break  # our own are in front
                owned = False
            share = in_flight * load.slowness
            if share < least and self.can_take(need, load):
                best, least = load, share
        return WAIT if best is None else Destination(best.instance)

    def can_take(self, need: TurnNeed, load: InstanceLoad) -> bool:
        if not load.runs_now(need.context_tokens):
            return False
        if need.resident and need.affine == load.instance:
            return True
        return load.residents == 0 or load.has_cache_for(need.expected_tokens)
