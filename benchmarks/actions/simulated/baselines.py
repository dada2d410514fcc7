"""Rules that the broker's own are compared with: amounts without elasticity, and short actions
first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.policy.actions.curve import DurationCurve
from slackwater.policy.actions.scheduling import SchedulingView
from slackwater.policy.actions.topology import Topology


def count_fitting(topology: Topology, amounts: Sequence[int]) -> int:
    """How many of these amounts, from the first on, can be had one after the other."""
    state = topology.start
    for count, units in enumerate(amounts):
        if units >= topology.after.shape[1]:
            return count
        state = int(topology.after[state, units])
        if state < 0:
            return count
    return len(amounts)


@dataclass(frozen=True, slots=True)
class LeastEach:
    """Every candidate starts with the least that it needs."""

    looks_ahead: bool = False
    may_delay: bool = False

    def decide(self, view: SchedulingView) -> list[int]:
        return [curve.least for curve in view.candidates]


@dataclass(frozen=True, slots=True)
class FixedDegree:
    """Every elastic action runs on the same number of units, as far as its choices admit, and waits
    until they are free.
    """

    degree: int
    looks_ahead: bool = False
    may_delay: bool = False

    def decide(self, view: SchedulingView) -> list[int]:
        wanted = [self._units(curve) for curve in view.candidates]
        starts = count_fitting(view.topology, wanted)
        return wanted[:starts] + [0] * (len(wanted) - starts)

    def _units(self, curve: DurationCurve) -> int:
        within = [units for units in curve.choices if units <= self.degree]
        return within[-1] if within else curve.least


@dataclass(frozen=True, slots=True)
class ShortFirst:
    """An action of expected length d may be overtaken by those that come within `patience` times d
    after it: short ones wait less, long ones a bounded while.
    """

    patience: float = 1.0
    head_start_s: float = 60.0

    def rank(self, submitted_s: float, priority: int, expected_s: float) -> float:
        return submitted_s - priority * self.head_start_s + self.patience * expected_s
