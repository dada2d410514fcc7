"""In which order waiting actions are looked at, and which start now on how many units.

A view is about one resource in one place: the cores of one node, the GPUs of the pool. The
candidates are the first actions in order whose least needs fit all at once; the rest waits behind
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slackwater.policy.actions.curve import DurationCurve
from slackwater.policy.actions.load import LoadAverage
from slackwater.policy.actions.topology import Topology


@dataclass(frozen=True, slots=True)
class SchedulingView:
    """`left_s` and `left_units`: how much longer what runs now is expected to take, and the units
    that this will set free.

    `capacity` is all units, free or not; `waiting_behind` counts those behind the candidates
    (`rest` has the first of them) and `soon` those that will have to wait with them; `short` knows
    how many units inelastic actions usually keep busy. A candidate may be put off for `patience_s`
    more.
    """

    topology: Topology
    free: int
    candidates: Sequence[DurationCurve]
    rest: Sequence[DurationCurve]
    left_s: NDArray[np.float64]
    left_units: NDArray[np.int64]
    capacity: int = 0
    waiting_behind: int = 0
    soon: float = 0.0
    short: LoadAverage | None = None
    patience_s: Sequence[float] = ()


class Scheduling(Protocol):
    """Decides who starts."""

    @property
    def looks_ahead(self) -> bool:
        """Whether it looks at the rest and at what runs; if not, the view may leave them out."""

    @property
    def puts_off(self) -> bool:
        """Whether it lets an elastic action wait for more units while short ones behind it pass.
        Then candidates may be more than fit at once: the inelastic ones fit, the elastic ones share
        what these leave.
        """

    def decide(self, view: SchedulingView) -> list[int]:
        """Units that fit the topology together, for each candidate; 0: it waits."""


class ActionOrder(Protocol):
    """Ranks actions at submission; the least goes first, equal ones by arrival. Ranks of later
    actions must in time exceed any earlier one, so that none is overtaken for ever.
    """

    def rank(self, submitted_s: float, priority: int, expected_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class ArrivalOrder:
    """By submission; a point of priority is worth `head_start_s` of waiting, so no one starves."""

    head_start_s: float = 60.0

    def rank(self, submitted_s: float, priority: int, expected_s: float) -> float:
        return submitted_s - priority * self.head_start_s
