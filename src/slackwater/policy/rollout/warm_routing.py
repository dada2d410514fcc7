"""Routing that keeps prefix caches warm: a cached prefix is worth more than a free slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.routing import WAIT, Destination, TurnNeed, find_affine


@dataclass(frozen=True, slots=True)
class KeepWarm:
    """Trajectories return to the instance that holds their prefix (their home). New ones start
    where their cache will still fit as it grows.

    With affinity alone (ROSE 4.3) turns go elsewhere whenever their home is full, and contexts
    evict each other from the caches. Here a trajectory in a working set waits for its home. Any
    other starts only where the working set with its expected growth still fits. A trajectory leaves
    a home that is `slow_home` times slower than another instance, because decoding there would cost
    more than a new prefill, unless it ends in time there (`long_tail`).
    """

    slow_home: float = 1.5
    started_first: bool = True

    def place(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination:
        home = find_affine(need, eligible)
        if need.time_left is not None:
            can_take = partial(self.can_take, need)
            spare = need.time_left.find_spare(need.context_tokens, home, eligible, can_take)
            if spare is not None:
                return Destination(spare.instance)
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
        for load in eligible:  # hot: with many instances this loop dominates a decision
            in_flight = load.in_flight
            if in_flight >= load.max_running:
                continue
            if load.owned is not owned:
                if best is not None:
                    break  # owned instances come first
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
