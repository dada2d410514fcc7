"""Spot capacity over time, drawn with given rates."""

from dataclasses import dataclass

import numpy as np

from slackwater.model.spot_trace import SpotEvent


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
