"""How long actions took, as a run saw them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class ActionTimes:
    """Completion times (queueing, overhead and execution together) by trajectory and by kind of
    action, and when all was over.
    """

    by_trajectory: dict[int, float] = field(default_factory=dict)
    by_kind: dict[str, list[float]] = field(default_factory=dict)
    finished_s: float = 0.0
    failed: int = 0
    decision_s: list[float] = field(default_factory=list)

    def add(self, trajectory: int, kind: str, seconds: float) -> None:
        self.by_trajectory[trajectory] = self.by_trajectory.get(trajectory, 0.0) + seconds
        self.by_kind.setdefault(kind, []).append(seconds)

    @property
    def mean_trajectory_s(self) -> float:
        """The paper's measure (6.3): the sum over a trajectory's actions, averaged over
        trajectories.
        """
        return _mean(list(self.by_trajectory.values()))

    def mean_s(self, kind: str) -> float:
        return _mean(self.by_kind.get(kind, []))

    @property
    def mean_action_s(self) -> float:
        return _mean([seconds for times in self.by_kind.values() for seconds in times])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
