"""A part of a trace of requests, or more load with the same bursts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slackwater.model.errors import ConfigError
from slackwater.sim.serving.serving_trace import Arrival


def median_window(arrivals: Sequence[Arrival], seconds: float) -> tuple[float, list[Arrival]]:
    """Of all whole windows of so long the one with the median number of requests: where it begins,
    and its own.
    """
    count = max(int(arrivals[-1].at_s // seconds), 1)
    places = np.minimum([arrival.at_s // seconds for arrival in arrivals], count - 1).astype(int)
    sizes = np.bincount(places, minlength=count)
    chosen = int(np.argsort(sizes, kind="stable")[(count - 1) // 2])
    from_s = chosen * seconds
    found = [
        replace(arrival, at_s=arrival.at_s - from_s)
        for arrival in arrivals
        if from_s <= arrival.at_s < from_s + seconds
    ]
    return from_s, found


def scaled(arrivals: Sequence[Arrival], times: float, seconds: float, seed: int) -> list[Arrival]:
    """`times` the load with the same bursts: copies shifted around the clock, the last one
    thinned.
    """
    if times <= 0:
        raise ConfigError.of("density", times, "must be above 0")
    rng = np.random.default_rng(seed)
    found: list[Arrival] = []
    copies = int(np.ceil(times))
    for copy in range(copies):
        kept = min(times - copy, 1.0)
        shift_s = copy * seconds / copies
        found += [
            replace(arrival, at_s=(arrival.at_s + shift_s) % seconds)
            for arrival in arrivals
            if kept >= 1.0 or rng.random() < kept
        ]
    return sorted(found, key=lambda arrival: arrival.at_s)
