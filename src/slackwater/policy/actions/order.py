"""In which order waiting actions are looked at: first come, first served by default, since a
starved action wastes its whole trajectory.
"""

from dataclasses import dataclass
from typing import Protocol


class ActionOrder(Protocol):
    """Gives every action a rank when it is submitted; the least goes first, equal ones as they
    came.

    No action may be overtaken for ever: ranks of later ones must in time exceed any earlier one's.
    """

    def rank(self, submitted_s: float, priority: int, expected_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class ArrivalOrder:
    """By time of submission. A point of priority is worth `head_start_s` seconds of waiting, so no
    one starves behind the important.
    """

    head_start_s: float = 60.0

    def rank(self, submitted_s: float, priority: int, expected_s: float) -> float:
        del expected_s
        return submitted_s - priority * self.head_start_s
