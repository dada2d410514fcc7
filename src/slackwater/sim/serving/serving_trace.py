"""Requests of online services from public traces (`t_s,prompt_tokens,output_tokens`), or drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slackwater.model.errors import ConfigError
from slackwater.sim.inputs.csv_rows import read_rows

_PREFIX_BLOCK = 512  # tokens of one id in `hash_ids`
_WHOLE_STEP_S = 3.0  # Mooncake publishes arrivals in steps of so long


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One row. `hash_ids` names its prompt's blocks of 512 tokens, where the trace says them."""

    t_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: str = ""

    def __post_init__(self) -> None:
        if self.t_s < 0:
            raise ConfigError.of("t_s", self.t_s, "must not be negative")
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError.of(name, getattr(self, name), "must not be negative")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as a cluster sees it; `cached_tokens` of its prompt were seen before."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


def read_serving_trace(
    path: Path, *, seconds: float, max_tokens: int = 32_768, seed: int = 0
) -> list[Arrival]:
    """The first `seconds` of a trace, by time. Prompts longer than the context are cut to
    fit it.
    """
    rng = np.random.default_rng(seed)
    rows = [
        row
        for row in read_rows(path, TracedRequest, ignore_other_columns=True)
        if row.t_s < seconds and row.prompt_tokens > 0 and row.output_tokens > 0
    ]
    if not rows:
        raise ConfigError.of("file", str(path), f"must hold a request within {seconds:g} s")
    spreads = any(row.hash_ids for row in rows)
    seen: set[str] = set()
    arrivals = []
    for row in sorted(rows, key=lambda row: row.t_s):
        output = min(row.output_tokens, max_tokens // 2)
        prompt = min(row.prompt_tokens, max_tokens - output)
        cached = _cached(row, seen)
        at_s = row.t_s + (float(rng.uniform(0.0, _WHOLE_STEP_S)) if spreads else 0.0)
        arrivals.append(Arrival(at_s, prompt, output, min(cached, prompt - 1)))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _cached(row: TracedRequest, seen: set[str]) -> int:
    blocks, hit = row.hash_ids.split(), 0
    for block in blocks:
        if block not in seen:
            break
        hit += 1
    seen.update(blocks)
    return hit * _PREFIX_BLOCK


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


def drawn_arrivals(
    seconds: float,
    seed: int,
    *,
    rate: float = 4.0,
    burst_every_s: float = 30.0,
    burst_requests: int = 12,
    prompt_tokens: int = 1200,
    output_tokens: int = 180,
) -> list[Arrival]:
    """A service with bursts, for storms and tests: a steady stream, and now and then many
    at once.
    """
    rng = np.random.default_rng(seed)
    times = list(np.cumsum(rng.exponential(1 / rate, int(2 * rate * seconds) + 1)))
    burst_s = float(rng.exponential(burst_every_s))
    while burst_s < seconds:
        times += (burst_s + rng.exponential(0.05, 1 + rng.poisson(burst_requests))).tolist()
        burst_s += float(rng.exponential(burst_every_s))
    return [
        Arrival(
            float(at_s),
            1 + int(min(rng.lognormal(np.log(prompt_tokens), 0.8), 12_000)),
            1 + int(min(rng.lognormal(np.log(output_tokens), 0.8), 2000)),
        )
        for at_s in sorted(times)
        if at_s < seconds
    ]
