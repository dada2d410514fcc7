"""Elastic scheduling: as many units for each as make the sum of completion times least (ARL-Tangram 4.2, Algorithm 1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slackwater.policy.actions.curve import Curve
from slackwater.policy.actions.eviction import evict
from slackwater.policy.actions.scheduling import SchedulingView

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def rows_of(curves: Sequence[Curve]) -> Floats:
    width = max(len(curve.seconds) for curve in curves)
    rows = np.full((len(curves), width), np.inf)
    for row, curve in zip(rows, curves, strict=True):
        row[: len(curve.seconds)] = curve.seconds
    return rows


def _at_least(curves: Sequence[Curve]) -> tuple[Floats, Ints]:
    seconds = np.array([curve.least_s for curve in curves], dtype=np.float64)
    return seconds, np.array([curve.least for curve in curves], dtype=np.int64)


def completions(view: SchedulingView, others: Sequence[Curve]) -> tuple[Floats, Ints]:
    """When units come free, ascending: of what runs now and of the inelastic ones that start now."""
    seconds, units = _at_least(others)
    ends = np.concatenate((view.left_s, seconds))
    order = np.argsort(ends)
    return ends[order], np.concatenate((view.left_units, units))[order]


@dataclass(frozen=True, slots=True)
class ElasticScheduling:
    """Candidates that cannot use more, or of whom too little is known, start with their least. The others share what is left, and
    the last of them are put off as long as that makes the sum of completion times smaller.

    `depth` amounts are tried for the first that waits, and `horizon` of those that wait are looked at.
    """

    depth: int = 2
    horizon: int = 256
    patience: int = 1
    looks_ahead: bool = True
    puts_off: bool = False

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
        curves: Sequence[Curve],
        others: Sequence[Curve],
        start: int,
        free: int,
    ) -> list[int]:
        ends, end_units = completions(view, others)
        rest = view.rest[: self.horizon]
        rest_s, rest_units = _at_least(rest)
        first = rest[0].choices[: self.depth] if rest and rest[0].known else ()
        first_units = np.array(first, dtype=np.int64)
        first_s = rest[0].seconds[first_units] if first else np.empty(0)
        chosen = evict(
            rows_of(curves),
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
