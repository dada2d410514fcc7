"""Capacity beside the dedicated engines: lent by a serving cluster, or leased by the quarter of an
hour.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from benchmarks.rollout.simulated.driven_engines import DrivenEngines
from slackwater.model.ids import InstanceId
from slackwater.model.instance import InstanceKind
from slackwater.model.spot_trace import SpotEvent
from slackwater.sim.rollout.engine_cost import EngineCost
from slackwater.sim.rollout.extra_capacity import SpotCapacity


class ExtraCapacity(Protocol):
    """Comes to the body's fleet by itself, and leaves."""

    def attach(self, body: DrivenEngines, engine: EngineCost) -> None:
        """Schedule all joins, cuts and losses."""
        ...


@dataclass(frozen=True, slots=True)
class LentServing:
    """Serving devices that run rollouts beside their own requests (ROSE 4.1).

    Serving keeps `kept_memory` of each device and takes `busy_share` of its time; when a burst
    comes (every `burst_every_s` on average) the rollout budget is halved until the stage ends.
    Weights are there in advance.
    """

    devices: int
    seed: int = 0
    busy_share: float = 0.19
    kept_memory: float = 0.35
    turns: int = 16
    burst_every_s: float = 600.0

    def attach(self, body: DrivenEngines, engine: EngineCost) -> None:
        rng = np.random.default_rng(self.seed)
        lent = replace(engine, memory_share=engine.memory_share - self.kept_memory)
        for number in range(self.devices):
            instance = InstanceId(f"lent{number}")
            spec = body.spec(instance, InstanceKind.BORROWED, lent, max_running=self.turns)
            body.join(spec, lent, slowdown=1 / (1 - self.busy_share))
            burst_s = float(rng.exponential(self.burst_every_s))
            body.schedule(burst_s, partial(body.cut, instance, 0.5))


@dataclass(frozen=True, slots=True)
class LeasedFunctions:
    """Serverless: as many at a time as asked for, each ends after `lease_s` and starts cold
    again.
    """

    devices: int
    turns: int = 16
    lease_s: float = 900.0
    cold_start_s: float = 45.0
    stage_s: float = 20_000.0

    def attach(self, body: DrivenEngines, engine: EngineCost) -> None:
        events: list[SpotEvent] = []
        for number in range(self.devices):
            start_s, life = 0.0, 0
            while start_s < self.stage_s:
                name = f"leased{number}.{life}"
                events.append(SpotEvent(start_s, "add", name))
                events.append(SpotEvent(start_s + self.lease_s, "remove", name))
                start_s, life = start_s + self.lease_s, life + 1
        events.sort(key=lambda row: row.t_s)
        SpotCapacity(tuple(events), self.turns, self.cold_start_s).attach(body, engine)


@dataclass(frozen=True, slots=True)
class CombinedCapacity:
    """Several kinds at once: one manager knows them all."""

    parts: Sequence[ExtraCapacity]

    def attach(self, body: DrivenEngines, engine: EngineCost) -> None:
        for part in self.parts:
            part.attach(body, engine)
