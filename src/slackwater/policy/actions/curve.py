"""How long an action takes on each amount of its elastic resource: T1 / (E(m) * m) (ARL-Tangram
4.1, equation 1)."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slackwater.model.amounts import Amounts, Efficiency


@dataclass(frozen=True, slots=True)
class DurationCurve:
    """The duration of an action by its number of units; infinite where the action cannot run.

    `choices` are the numbers of units that it may get. Unless `known`, the duration is a guess.
    `convex`: each further unit saves no more time than the one before.
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
        """The duration on the fewest units."""
        return float(self.seconds[self.choices[0]])

    def most(self, units: float) -> int:
        """The largest choice that is at most `units`; 0 if there is none."""
        return max((choice for choice in self.choices if choice <= units), default=0)

    @property
    def elastic(self) -> bool:
        """Whether there are several choices with known durations."""
        return self.known and len(self.choices) > 1


def limit_choices(curve: DurationCurve, most: float) -> DurationCurve:
    """The curve without the choices above `most`; unchanged if all choices are above it."""
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
    """Create a curve from the duration on one unit, or if that is unknown, from a guess of the
    duration on the fewest units.
    """
    shape, convex = _shape(amounts, efficiency)
    if single_unit_s is None:
        flat = np.where(np.isfinite(shape), guess_s, np.inf)
        return DurationCurve(flat, amounts.choices, convex=True, known=False)
    known = efficiency is not None
    return DurationCurve(shape * single_unit_s, amounts.choices, convex, known)
