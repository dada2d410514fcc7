"""Spot capacity over time: a public trace (`t_s,event,instance_id`), or one drawn with given rates."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slackwater.model.errors import ConfigError
from slackwater.sim.csv_rows import read_rows


@dataclass(frozen=True, slots=True)
class SpotEvent:
    """An instance may be had from now on (`add`), or is taken away (`remove`)."""

    t_s: float
    event: str
    instance_id: str

    def __post_init__(self) -> None:
        if self.event not in ("add", "remove"):
            raise ConfigError.of("event", self.event, "must be add or remove")
        if self.t_s < 0:
            raise ConfigError.of("t_s", self.t_s, "must not be negative")


def read_spot_trace(path: Path) -> tuple[SpotEvent, ...]:
    """The file's events in order of time; each id is added once and removed at most once, after that."""
    events = sorted(read_rows(path, SpotEvent), key=lambda row: row.t_s)
    alive: dict[str, bool] = {}
    for row in events:
        state = alive.get(row.instance_id)
        if (row.event == "add") != (state is None) or state is False:
            at = f"{path.name}: {row.event} {row.instance_id} at {row.t_s:g} s"
            raise ConfigError(f"{at}: an id must be added once, then removed at most once")
        alive[row.instance_id] = row.event == "add"
    return tuple(events)


@dataclass(frozen=True, slots=True)
class SpotRates:
    """A drawn trace: about `mean_instances`, replaced as they go, `removals_per_h` for each instance."""

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


# Means and removal rates of the three 2 h segments of RLBoost Table 5, for runs without trace files.
DRAWN_SEGMENTS = {
    "A": SpotRates(6.53, 8 / 6.53 / 2),
    "B": SpotRates(4.58, 9 / 4.58 / 2),
    "C": SpotRates(6.06, 2 / 6.06 / 2),
}
