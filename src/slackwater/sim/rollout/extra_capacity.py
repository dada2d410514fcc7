"""Capacity beside the dedicated engines: spot instances that come and go by a trace, which is given
or drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from slackwater.control.rollout.events import InstanceNotice
from slackwater.model.ids import InstanceId
from slackwater.model.instance import InstanceKind
from slackwater.model.spot_trace import SpotEvent
from slackwater.sim.rollout.engine_cost import EngineCost
from slackwater.sim.rollout.simulated_instances import SimulatedInstances


@dataclass(frozen=True, slots=True)
class SpotRates:
    """About `mean_instances`, replaced as they go, with `removals_per_h` for each."""

    mean_instances: float
    removals_per_h: float
    hours: float = 2.0

    def draw(self, seed: int) -> tuple[SpotEvent, ...]:
        """Instances arrive so that the mean holds; each lives an exponential time."""
        rng = np.random.default_rng(seed)
        end_s, life_s = self.hours * 3600, 3600 / self.removals_per_h
        events: list[SpotEvent] = []
        starts = [0.0] * rng.poisson(self.mean_instances)
        clock_s = rng.exponential(life_s / self.mean_instances)
        while clock_s < end_s:
            starts.append(float(clock_s))
            clock_s += rng.exponential(life_s / self.mean_instances)
        for number, start_s in enumerate(starts):
            gone_s = start_s + rng.exponential(life_s)
            events.append(SpotEvent(start_s, "add", f"spot{number}"))
            if gone_s < end_s:
                events.append(SpotEvent(gone_s, "remove", f"spot{number}"))
        return tuple(sorted(events, key=lambda row: row.t_s))


@dataclass(frozen=True, slots=True)
class SpotCapacity:
    """Spot instances by a trace: each starts in `start_s` and has `notice_s` before it leaves."""

    trace: Sequence[SpotEvent]
    turns: int = 16
    start_s: float = 30.0
    notice_s: float = 0.0

    def attach(self, body: SimulatedInstances, engine: EngineCost) -> None:
        gone: set[str] = set()

        def join(name: str) -> None:
            if name not in gone:
                kind, turns = InstanceKind.SPOT, self.turns
                spec = body.spec(InstanceId(name), kind, engine, max_running=turns)
                body.join(spec, engine)

        def warn(name: str) -> None:
            if (instance := InstanceId(name)) in body.places:
                body.stream_all()
                leaves_at_s = body.now_s + self.notice_s
                body.tell(InstanceNotice(body.now_s, instance, leaves_at_s))

        def leave(name: str) -> None:
            gone.add(name)
            body.lose(InstanceId(name))

        for row in self.trace:
            if row.event == "add":
                body.schedule(row.t_s + self.start_s, partial(join, row.instance_id))
            else:
                if self.notice_s:
                    body.schedule(row.t_s - self.notice_s, partial(warn, row.instance_id))
                body.schedule(row.t_s, partial(leave, row.instance_id))
