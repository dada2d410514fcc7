"""The time of a model's step on a device: measured at the start, corrected while it runs (ROSE
4.1).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

import numpy as np

from slackwater.model.errors import ConfigError

_WEIGHT = 0.05  # of a new measurement in a correction


class StepWork(NamedTuple):
    """The work of a step: `rows` pass through the weights, and `pairs` of a token and a context
    token through attention. A prompt chunk of n tokens after c others has n rows and about n * (c +
    n / 2) `prompt_pairs`, each of which costs less than a pair of a decoding request.
    """

    rows: int
    pairs: float = 0.0
    prompt_pairs: float = 0.0


def step_work(
    decoding: int, context: float, prompt_tokens: int, prompt_context: float = 0.0
) -> StepWork:
    """The work of decoding requests with `context` tokens in total, and of a prompt chunk."""
    pairs = prompt_tokens * (prompt_context + prompt_tokens / 2)
    return StepWork(decoding + prompt_tokens, context, pairs)


@dataclass(frozen=True, slots=True)
class StepCostCurve:
    """Seconds by rows, interpolated linearly between the measured sizes and beyond the last."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    _asked: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds) or len(self.rows) < 2:
            raise ConfigError.of("step cost", len(self.rows), "must be measured at 2 sizes or more")
        if any(b <= a for a, b in pairwise(self.rows)) or self.rows[0] < 1:
            raise ConfigError.of("step cost: rows", self.rows, "must rise, from 1 on")
        if min(self.seconds) <= 0:
            raise ConfigError.of("step cost: seconds", self.seconds, "must be above 0")

    def step_s(self, rows: int) -> float:
        """The time of a step with `rows` rows. Cached, because the same sizes recur."""
        found = self._asked.get(rows)
        if found is None:
            found = self._asked[rows] = self._interpolate_s(rows)
        return found

    def _interpolate_s(self, rows: int) -> float:
        sizes, seconds = self.rows, self.seconds
        place = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        first, low, high = sizes[place - 1], seconds[place - 1], seconds[place]
        return max(low + (high - low) * (rows - first) / (sizes[place] - first), min(low, high))


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of a step by its rows (`prompt` if it has prompt tokens, else `decode`), plus the
    time of its pairs.
    """

    prompt: StepCostCurve
    decode: StepCostCurve
    pair_s: float = 0.0
    prompt_pair_s: float = 0.0

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        seconds: Sequence[float],
        pair_s: float = 0.0,
        prompt_pair_s: float = 0.0,
    ) -> "StepCost":
        """A cost with the same curve for steps with and without prompt tokens."""
        curve = StepCostCurve(tuple(rows), tuple(seconds))
        return cls(curve, curve, pair_s, prompt_pair_s)

    def step_s(self, work: StepWork) -> float:
        """The time of one step."""
        if work.prompt_pairs:
            dense_s = self.prompt.step_s(work.rows) + work.prompt_pairs * self.prompt_pair_s
        else:
            dense_s = self.decode.step_s(work.rows)
        return dense_s + work.pairs * self.pair_s

    def batch_step_s(
        self, decoding: int, context: float, prompt_tokens: int, prompt_context: float
    ) -> float:
        """The time of a step with decoding requests and a prompt chunk. The same as `step_s` of
        their `step_work`, but faster.
        """
        if prompt_tokens:
            pairs = prompt_tokens * (prompt_context + prompt_tokens / 2)
            dense_s = self.prompt.step_s(decoding + prompt_tokens) + pairs * self.prompt_pair_s
        else:
            dense_s = self.decode.step_s(decoding)
        return dense_s + context * self.pair_s

    def chunk_within(
        self, limit_s: float, decoding: int, context: float, prompt_context: float, most: int
    ) -> int:
        """The largest prompt chunk, up to `most` tokens, for a step within `limit_s`; 0 if none
        fits. On each linear segment of the curve the time is a quadratic function of the tokens. It
        is solved on the last segment whose first token fits.
        """
        curve, pair_s, half_s = self.prompt, self.prompt_pair_s, self.prompt_pair_s / 2
        spare_s, context_s = limit_s - context * self.pair_s, pair_s * prompt_context
        if most < 1:
            return 0
        high, high_s = most, curve.step_s(decoding + most)
        if high_s + most * (context_s + half_s * most) <= spare_s:
            return most
        low, low_s = 1, curve.step_s(decoding + 1)
        if low_s + context_s + half_s > spare_s:
            return 0
        sizes, seconds = curve.rows, curve.seconds
        for place in range(bisect_left(sizes, decoding + 2), len(sizes)):
            tokens, size_s = sizes[place] - decoding, seconds[place]
            if tokens >= most:
                break
            if size_s + tokens * (context_s + half_s * tokens) > spare_s:
                high, high_s = tokens, size_s
                break
            low, low_s = tokens, size_s
        slope_s = (high_s - low_s) / max(high - low, 1)
        linear_s, left_s = slope_s + context_s, spare_s - low_s + slope_s * low
        # The root of half_s * n ** 2 + linear_s * n = left_s, in a form that also works if half_s
        # is 0.
        root = linear_s + sqrt(max(linear_s * linear_s + 4 * half_s * left_s, 0.0))
        return min(max(int(2 * left_s / root), low), high) if root > 0 else low

    def prompt_s(self, tokens: int, context: int, step_tokens: int) -> float:
        """The time of a prompt of `tokens` after `context` others, alone, in steps of
        `step_tokens`.
        """
        whole, rest = divmod(tokens, step_tokens)
        full_s = whole * self.prompt.step_s(step_tokens) if whole else 0.0
        last_s = self.prompt.step_s(rest) if rest else 0.0
        return full_s + last_s + tokens * (context + tokens / 2) * self.prompt_pair_s


def fit_step_cost(
    prompts: Sequence[tuple[StepWork, float]], decodes: Sequence[tuple[StepWork, float]]
) -> StepCost:
    """Fit the cost from measured steps: those with the fewest pairs give the curves, the others
    give the cost of a pair.
    """
    prompt, prompt_pair_s = _fit(prompts, "prompt_pairs")
    decode, pair_s = _fit(decodes, "pairs")
    return StepCost(prompt, decode, pair_s, prompt_pair_s)


def _fit(samples: Sequence[tuple[StepWork, float]], kind: str) -> tuple[StepCostCurve, float]:
    most = max(getattr(work, kind) for work, _ in samples)
    far = [(work, took_s) for work, took_s in samples if getattr(work, kind) > most / 2]
    near: dict[int, list[tuple[float, float]]] = {}
    for work, took_s in samples:
        near.setdefault(work.rows, []).append((getattr(work, kind), took_s))
    sizes = sorted(near)
    least = {size: min(pairs for pairs, _ in near[size]) for size in sizes}
    medians = [
        float(np.median([took_s for pairs, took_s in near[size] if pairs <= 2 * least[size]]))
        for size in sizes
    ]
    if len(sizes) == 1:
        sizes, medians = [sizes[0], sizes[0] + 1], [medians[0], medians[0]]
    rising = np.maximum.accumulate(np.array(medians)).tolist()
    curve = StepCostCurve(tuple(sizes), tuple(rising))
    rates = [
        (took_s - curve.step_s(work.rows)) / (getattr(work, kind) - least.get(work.rows, 0.0))
        for work, took_s in far
        if getattr(work, kind) > 4 * least.get(work.rows, 0.0)
    ]
    return curve, max(float(np.median(rates)), 0.0) if rates else 0.0


class Correction:
    """The ratio of measured to predicted time, as a moving mean and mean deviation."""

    def __init__(self) -> None:
        self.mean = 1.0
        self.spread = 0.0

    def observe(self, predicted_s: float, took_s: float) -> None:
        if predicted_s <= 0:
            return
        ratio = min(took_s / predicted_s, 20.0)
        self.spread += _WEIGHT * (abs(ratio - self.mean) - self.spread)
        self.mean += _WEIGHT * (ratio - self.mean)

    def relax(self) -> None:
        """Move the estimate towards 1. Called when no step ran because of it: otherwise nothing
        would ever be measured again.
        """
        self.mean += 0.02 * (1.0 - self.mean)
        self.spread *= 0.98

    @property
    def upper(self) -> float:
        """The factor for a conservative prediction."""
        return self.mean + 2.0 * self.spread
