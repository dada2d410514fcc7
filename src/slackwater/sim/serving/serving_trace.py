"""Requests of online services from public traces (`t_s,prompt_tokens,output_tokens`), or drawn."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slackwater.model.errors import ConfigError, check_not_negative
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
        check_not_negative("", self, "t_s", "prompt_tokens", "output_tokens")


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
    """The first `seconds` of a trace, by time; prompts are cut to fit the context."""
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
        cached = _count_cached(row, seen)
        at_s = row.t_s + (float(rng.uniform(0.0, _WHOLE_STEP_S)) if spreads else 0.0)
        arrivals.append(Arrival(at_s, prompt, output, min(cached, prompt - 1)))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _count_cached(row: TracedRequest, seen: set[str]) -> int:
    blocks, hit = row.hash_ids.split(), 0
    for block in blocks:
        if block not in seen:
            break
        hit += 1
    seen.update(blocks)
    return hit * _PREFIX_BLOCK


def draw_arrivals(
    seconds: float,
    seed: int,
    *,
    rate: float = 4.0,
    burst_every_s: float = 30.0,
    burst_requests: int = 12,
    prompt_tokens: int = 1200,
    output_tokens: int = 180,
) -> list[Arrival]:
    """A service for storms and tests: a steady stream with bursts."""
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
