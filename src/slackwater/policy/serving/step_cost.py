"""What a step of a model costs on a device: measured at the start, corrected while it runs (ROSE 4.1)."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from slackwater.model.errors import ConfigError


class StepWork(NamedTuple):
    """One step: `rows` go through the weights, `pairs` of token and context through attention.

    A decoding request is one row and as many pairs as its context is long; a prompt's chunk of n tokens
    after c others is n rows and about n * (c + n / 2) `prompt_pairs`, which cost less each.
    """

    rows: int
    pairs: float = 0.0
    prompt_pairs: float = 0.0


def step_work(
    decoding: int, context: float, prompt_tokens: int, prompt_context: float = 0.0
) -> StepWork:
    """Decoding requests with `context` tokens among them, and a chunk of a prompt."""
    pairs = prompt_tokens * (prompt_context + prompt_tokens / 2)
    return StepWork(decoding + prompt_tokens, context, pairs)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds by rows, with straight lines between the sizes measured, and by pairs."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    pair_s: float = 0.0
    prompt_pair_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds) or len(self.rows) < 2:
            raise ConfigError.of("step cost", len(self.rows), "must be measured at 2 sizes or more")
        if any(b <= a for a, b in pairwise(self.rows)) or self.rows[0] < 1:
            raise ConfigError.of("step cost: rows", self.rows, "must rise, from 1 on")
        if min(self.seconds) <= 0:
            raise ConfigError.of("step cost: seconds", self.seconds, "must be above 0")

    def step_s(self, work: StepWork) -> float:
        """One step."""
        rows, sizes, seconds = work.rows, self.rows, self.seconds
        place = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        first, last = sizes[place - 1], sizes[place]
        low, high = seconds[place - 1], seconds[place]
        dense = max(low + (high - low) * (rows - first) / (last - first), min(low, high))
        return dense + work.pairs * self.pair_s + work.prompt_pairs * self.prompt_pair_s

    def prompt_s(
        self,
        tokens: int,
        context: int,
        step_tokens: int,
        decoding: int = 0,
        decode_context: int = 0,
    ) -> float:
        """A prompt of `tokens` after `context` others, in steps of at most `step_tokens` rows."""
        room = max(step_tokens - decoding, 1)
        whole, rest = divmod(tokens, room)
        pairs = tokens * (context + tokens / 2)
        full_s = self.step_s(StepWork(room + decoding, decode_context))
        last_s = self.step_s(StepWork(rest + decoding, decode_context)) if rest else 0.0
        return whole * full_s + last_s + pairs * self.prompt_pair_s


def fit_step_cost(samples: Sequence[tuple[StepWork, float]]) -> StepCost:
    """From measured steps. Samples without pairs give the times by rows, the others what pairs add."""
    plain: dict[int, list[float]] = {}
    for work, seconds in samples:
        if not work.pairs and not work.prompt_pairs:
            plain.setdefault(work.rows, []).append(seconds)
    sizes = sorted(plain)
    medians = [float(np.median(plain[size])) for size in sizes]
    rising = np.maximum.accumulate(np.array(medians)).tolist()
    cost = StepCost(tuple(sizes), tuple(rising))
    rates = []
    for kind in ("pairs", "prompt_pairs"):
        found = [
            (seconds - cost.step_s(StepWork(work.rows))) / getattr(work, kind)
            for work, seconds in samples
            if getattr(work, kind) > 0
        ]
        rates.append(max(float(np.median(found)), 0.0) if found else 0.0)
    return StepCost(cost.rows, cost.seconds, rates[0], rates[1])


class Correction:
    """How far what happens is from what was predicted: a mean ratio and its spread, newest weighing most."""

    def __init__(self, weight: float = 0.05) -> None:
        self._weight = weight
        self.mean = 1.0
        self.spread = 0.0

    def observe(self, predicted_s: float, took_s: float) -> None:
        """One step took so long."""
        if predicted_s <= 0:
            return
        ratio = min(took_s / predicted_s, 20.0)
        self.spread += self._weight * (abs(ratio - self.mean) - self.spread)
        self.mean += self._weight * (ratio - self.mean)

    @property
    def upper(self) -> float:
        """What a careful prediction is multiplied with."""
        return self.mean + 2.0 * self.spread
