"""Elastic scheduling: as many units for each as make the sum of completion times least (ARL-Tangram
4.2, Algorithm 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.actions.simulated.eviction import evict
from slackwater.policy.actions.curve import DurationCurve
from slackwater.policy.actions.priced import list_completions, list_least_durations, stack_rows
from slackwater.policy.actions.scheduling import SchedulingView


@dataclass(frozen=True, slots=True)
class ElasticScheduling:
    """Candidates that cannot use more, or of whom too little is known, start with their least. The
    others share what is left, and the last of them are put off as long as that makes the sum of
    completion times smaller.

    `depth` amounts are tried for the first that waits, and `horizon` of those that wait are looked
    at.
    """

    depth: int = 2
    horizon: int = 256
    patience: int = 1
    looks_ahead: bool = True
    may_delay: bool = False

    def decide(self, view: SchedulingView) -> list[int]:
        amounts = [curve.least for curve in view.candidates]
        elastic = [i for i, curve in enumerate(view.candidates) if curve.elastic]
        if not elastic:
            return amounts
        curves = [view.candidates[i] for i in elastic]
        others = [curve for curve in view.candidates if not curve.elastic]
        start, free = view.topology.start, view.free
        for curve in others:
            start = int(view.topology.after[start, curve.least])
            free -= curve.least
        shares = self._share(view, curves, others, start, free)
        for i, units in zip(elastic, shares, strict=True):
            amounts[i] = units
        return amounts

    def _share(
        self,
        view: SchedulingView,
        curves: Sequence[DurationCurve],
        others: Sequence[DurationCurve],
        start: int,
        free: int,
    ) -> list[int]:
        ends, end_units = list_completions(view, others)
        rest = view.rest[: self.horizon]
        rest_s, rest_units = list_least_durations(rest)
        first = rest[0].choices[: self.depth] if rest and rest[0].known else ()
        first_units = np.array(first, dtype=np.int64)
        first_s = rest[0].seconds[first_units] if first else np.empty(0)
        chosen = evict(
            stack_rows(curves),
            np.array([curve.least for curve in curves], dtype=np.int64),
            view.topology.plain and all(curve.convex for curve in curves),
            view.topology.after,
            start,
            free,
            ends,
            end_units,
            rest_s,
            rest_units,
            first_s,
            first_units,
            self.depth,
            self.patience,
        )
        shares: list[int] = chosen.tolist()
        return shares
