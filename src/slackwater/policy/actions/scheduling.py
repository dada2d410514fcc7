"""The order of waiting actions, and which of them start now on how many units of one resource in
one place. The candidates are the first actions in order whose minimum needs fit together.
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
    """Decides which actions start."""

    @property
    def looks_ahead(self) -> bool:
        """Whether it uses `rest` and the running actions; if not, the view may omit them."""

    @property
    def may_delay(self) -> bool:
        """Whether elastic actions may wait for more units while short ones overtake them. Then only
        the inelastic candidates must fit together; the elastic ones share the remaining units.
        """

    def decide(self, view: SchedulingView) -> list[int]:
        """The units of each candidate, which together fit the topology; 0 if it must wait."""


class ActionOrder(Protocol):
    """Ranks actions at submission. The lowest rank goes first, equal ones by arrival. The ranks of
    later actions must eventually exceed every earlier one, so that no action starves.
    """

    def rank(self, submitted_s: float, priority: int, expected_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class ArrivalOrder:
    """By submission. One point of priority counts as `head_start_s` of waiting, so no action
    starves.
    """

    head_start_s: float = 60.0

    def rank(self, submitted_s: float, priority: int, expected_s: float) -> float:
        return submitted_s - priority * self.head_start_s
