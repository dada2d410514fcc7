"""How long an action takes on each amount of its elastic resource: T1 / (E(m) * m) (ARL-Tangram
4.1, equation 1)."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slackwater.model.amounts import Amounts, Efficiency


@dataclass(frozen=True, slots=True)
class DurationCurve:
    """Seconds by units, infinite where the action cannot run; a guess unless `known`. `convex`:
    each further unit helps no more than the one before.
    """

    seconds: NDArray[np.float64]
    choices: tuple[int, ...]
    convex: bool
    known: bool

    @property
    def least(self) -> int:
        return self.choices[0]

    @property
    def least_s(self) -> float:
        """How long on the least units."""
        return float(self.seconds[self.choices[0]])

    def most(self, units: float) -> int:
        """The largest choice of so many at most; 0 if there is none."""
        return max((choice for choice in self.choices if choice <= units), default=0)

    @property
    def elastic(self) -> bool:
        """Whether there is something to choose."""
        return self.known and len(self.choices) > 1


def limit_choices(curve: DurationCurve, most: float) -> DurationCurve:
    """The same without the choices above `most`; as it was, if all are above it."""
    if not curve.choices or curve.choices[-1] <= most or curve.choices[0] > most:
        return curve
    choices = tuple(units for units in curve.choices if units <= most)
    return replace(curve, seconds=curve.seconds[: choices[-1] + 1], choices=choices)


@lru_cache(maxsize=1024)
def _shape(amounts: Amounts, efficiency: Efficiency | None) -> tuple[NDArray[np.float64], bool]:
    """The curve of an action that takes one second on one unit."""
    shape = np.full(amounts.most + 1, np.inf)
    for units in amounts.choices:
        shape[units] = 1.0 if efficiency is None or units == 0 else 1 / efficiency.speedup(units)
    at = shape[list(amounts.choices)]
    contiguous = len(at) == amounts.most - amounts.least + 1
    gains = at[:-1] - at[1:]
    convex = contiguous and bool(np.all(np.diff(gains) <= 1e-12))
    shape.setflags(write=False)
    return shape, convex


def make_curve(
    amounts: Amounts, efficiency: Efficiency | None, single_unit_s: float | None, guess_s: float
) -> DurationCurve:
    """With the duration on one unit if it is known; otherwise with a guess of the duration on the
    least."""
    shape, convex = _shape(amounts, efficiency)
    if single_unit_s is None:
        flat = np.where(np.isfinite(shape), guess_s, np.inf)
        return DurationCurve(flat, amounts.choices, convex=True, known=False)
    known = efficiency is not None
    return DurationCurve(shape * single_unit_s, amounts.choices, convex, known)
