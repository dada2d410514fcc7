"""In which order waiting actions are looked at, and which start now on how many units of one
resource in one place. Candidates are the first whose least needs fit all at once.
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
    """What a scheduling policy sees of one resource.

    The running actions end in `left_s` and then release `left_units` of the `capacity` units.
    `waiting_behind` more actions wait behind the candidates (`rest` are the first of them), and
    `expected_arrivals` elastic ones will arrive soon. `short` is the usual load of inelastic
    actions. Candidate i may be delayed for another `patience_s[i]`.
    """

    topology: Topology
    free: int
    candidates: Sequence[DurationCurve]
    rest: Sequence[DurationCurve]
    left_s: NDArray[np.float64]
    left_units: NDArray[np.int64]
    capacity: int = 0
    waiting_behind: int = 0
    expected_arrivals: float = 0.0
    short: LoadAverage | None = None
    patience_s: Sequence[float] = ()


class Scheduling(Protocol):
    """Decides who starts."""

    @property
    def looks_ahead(self) -> bool:
        """Whether it looks at the rest and at what runs; if not, the view may leave them out."""

    @property
    def may_delay(self) -> bool:
        """Whether elastic actions may wait for more units while short ones pass. Then only the
        inelastic candidates fit all at once, and the elastic ones share what these leave.
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
