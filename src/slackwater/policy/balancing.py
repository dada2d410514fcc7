"""Which turns move between instances (RLBoost Algorithm 2, CONTINUOUSLB), and the ways it is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slackwater.model.ids import InstanceId
from slackwater.policy.instance_load import InstanceLoad


@dataclass(frozen=True, slots=True)
class Move:
    """Take up to `count` turns from `source` to `target`: pending ones, or running ones."""

    source: InstanceId
    target: InstanceId
    count: int
    running: bool


class BalancingPolicy(Protocol):
    """Looks at the fleet now and then, and may move turns."""

    def moves(self, loads: Sequence[InstanceLoad], plateau: int | None) -> Sequence[Move]:
        """Decide on the loads of all instances; `plateau` is the batch beyond which more gains little."""
        ...


@dataclass(frozen=True, slots=True)
class NoBalancing:
    """Baseline: turns stay where they were sent."""

    def moves(self, loads: Sequence[InstanceLoad], plateau: int | None) -> Sequence[Move]:
        del loads, plateau
        return ()


@dataclass(frozen=True, slots=True)
class FillIdle:
    """RLBoost: one pending turn from the fullest to an instance without any; running ones only to an idle
    instance, and only those beyond the plateau."""

    def moves(self, loads: Sequence[InstanceLoad], plateau: int | None) -> Sequence[Move]:
        taking = [load for load in loads if load.accepting]
        hungry = [
            load for load in taking if load.pending == 0 and load.in_flight < load.max_running
        ]
        fullest = max(taking, key=lambda load: (load.pending, load.instance), default=None)
        if fullest is not None and fullest.pending > 0:
            targets = sorted(hungry, key=lambda load: (load.in_flight, load.instance))
            return tuple(
                Move(fullest.instance, target.instance, 1, running=False) for target in targets[:1]
            )
        idle = min(
            (load for load in taking if load.in_flight == 0),
            key=lambda load: load.instance,
            default=None,
        )
        if idle is None or plateau is None:
            return ()
        busiest = max(taking, key=lambda load: (load.executing, load.instance))
        excess = min(max(busiest.executing - plateau, 0), idle.max_running)
        return (Move(busiest.instance, idle.instance, excess, running=True),) if excess else ()
