"""A linear model of the time of a decode step, learned while engines run: a constant, and terms per
turn, per token of context, and per token prefilled in the same step. Decoding is memory-bound: a
step reads the weights once and the context of every turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_PARTS = 4
_FADE = 0.995  # decay of the weight of older observations at each new one
_ENOUGH = 16  # observations before the first fit
_REMEMBERED = 200  # about how many observations count
_RENEWED = 16  # fit again when one in so many of them is new
_ALIKE = 1.25  # smaller ratios count as equal speed
_FOLLOWS = 0.1  # least weight of a new observation of slowness


@dataclass(frozen=True, slots=True)
class StepTime:
    """`base_s + per_turn_s * batch + per_token_s * context`, plus the time for prefilled tokens."""

    base_s: float
    per_turn_s: float
    per_token_s: float
    per_prefilled_s: float = 0.0

    def step_s(self, batch: float, context_tokens: float, prefilled_tokens: float = 0.0) -> float:
        """The time of one step of a batch with `context_tokens` in total."""
        decode_s = self.base_s + self.per_turn_s * batch + self.per_token_s * context_tokens
        return decode_s + self.per_prefilled_s * prefilled_tokens

    def scale(self, slowness: float) -> "StepTime":
        """The model of an engine that takes `slowness` times as long."""
        return StepTime(
            self.base_s * slowness,
            self.per_turn_s * slowness,
            self.per_token_s * slowness,
            self.per_prefilled_s * slowness,
        )


class StepTimeFit:
    """Fits the model by least squares with exponentially decaying weights; no term is negative."""

    def __init__(self) -> None:
        self._seen = 0
        self._gram = [[0.0] * _PARTS for _ in range(_PARTS)]
        self._moment = [0.0] * _PARTS
        self._fitted: StepTime | None = None
        self._fit_at = _ENOUGH  # observations
        self._typical_log = 0.0  # mean log of the slowness of recently measured engines

    def observe(
        self,
        batch: float,
        context_tokens: float,
        step_s: float,
        prefilled_tokens: float = 0.0,
        slowness: float = 1.0,
    ) -> None:
        """Record one step of an engine that takes `slowness` times as long as the model says. Only
        its difference from the typical engine is divided out; otherwise nothing would fix the
        model's scale.
        """
        if batch <= 0 or step_s <= 0:
            return
        self._typical_log += 0.05 * (math.log(slowness) - self._typical_log)
        step_s *= math.exp(self._typical_log) / slowness
        row = (1.0, batch / 100, context_tokens / 1e5, prefilled_tokens / 100)  # near 1
        weight = 1.0 / step_s**2  # relative errors count alike
        for place, part in enumerate(row):
            weighted = weight * part
            self._gram[place] = [
                _FADE * old + weighted * other
                for old, other in zip(self._gram[place], row, strict=True)
            ]
            self._moment[place] = _FADE * self._moment[place] + weighted * step_s
        self._seen += 1

    @property
    def model(self) -> StepTime | None:
        """The fitted model; None until there are enough observations. It is solved again only now
        and then: a large fleet makes hundreds of observations a second, and solving is the most
        expensive part.
        """
        if self._seen >= self._fit_at:
            self._fitted = self._solve()
            self._fit_at = self._seen + max(min(self._seen, _REMEMBERED) // _RENEWED, 1)
        return self._fitted

    def _solve(self) -> StepTime:
        """Solve, and drop negative terms one by one. For nearly orthogonal columns the result is
        close to the constrained optimum.
        """
        active = list(range(_PARTS))
        ridge = 1e-6 * sum(self._gram[place][place] for place in active) / 3
        while True:
            found = self._solve_for(active, ridge)
            if len(active) == 1 or min(found) >= 0:
                break
            active.pop(found.index(min(found)))
        parts = [0.0] * _PARTS
        for place, part in zip(active, found, strict=True):
            parts[place] = max(part, 0.0)
        base, turn, token, prefill = parts
        return StepTime(base, turn / 100.0, token / 1e5, prefill / 100.0)

    def _solve_for(self, active: Sequence[int], ridge: float) -> list[float]:
        """Solve for the active terms by Gaussian elimination. The ridge makes the matrix positive
        definite, so no pivot is zero. NumPy takes ten times as long for four numbers.
        """
        rows = [
            [self._gram[i][j] + ridge * (i == j) for j in active] + [self._moment[i]]
            for i in active
        ]
        for place, pivot in enumerate(rows):
            for row in rows[place + 1 :]:
                factor = row[place] / pivot[place]
                for column in range(place, len(row)):
                    row[column] -= factor * pivot[column]
        found: list[float] = []
        for place in reversed(range(len(rows))):
            row = rows[place]
            known = sum(a * b for a, b in zip(row[place + 1 : -1], found, strict=True))
            found.insert(0, (row[-1] - known) / row[place])
        return found


class Slowness:
    """How many times as long one engine takes as the model of all engines says. It is 1 unless the
    ratio exceeds `_ALIKE`, because measurements scatter.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._log = 0.0

    def observe(self, step_s: float, expected_s: float) -> None:
        """Record the time of a step, and the time that the model of all engines expects."""
        if step_s <= 0 or expected_s <= 0:
            return
        self._seen += 1
        share = max(1.0 / self._seen, _FOLLOWS)
        self._log += share * (math.log(step_s / expected_s) - self._log)

    @property
    def factor(self) -> float:
        return 1.0 if abs(self._log) <= math.log(_ALIKE) else math.exp(self._log)
