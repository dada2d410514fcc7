"""Elastic scheduling with a price for the time that an action makes others wait.

ARL-Tangram's Algorithm 1 divides the units that are free at the moment. Under load these are few,
so a long test suite would run on one core from start to end. Here a unit used for one second delays
each waiting action by 1 / capacity seconds, which gives the price of a unit-second. An action gets
the number of units m with the least T(m) + price * m * T(m). The first action in line may wait for
more units if it then ends at a lower cost. It is delayed once, for no longer than it hopes to gain,
so no action starves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slackwater.policy.actions.curve import DurationCurve
from slackwater.policy.actions.scheduling import SchedulingView
from slackwater.policy.compiled import jit_compile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def stack_rows(curves: Sequence[DurationCurve]) -> Floats:
    width = max(len(curve.seconds) for curve in curves)
    rows = np.full((len(curves), width), np.inf)
    for row, curve in zip(rows, curves, strict=True):
        row[: len(curve.seconds)] = curve.seconds
    return rows


def list_least_durations(curves: Sequence[DurationCurve]) -> tuple[Floats, Ints]:
    seconds = np.array([curve.least_s for curve in curves], dtype=np.float64)
    return seconds, np.array([curve.least for curve in curves], dtype=np.int64)


def list_completions(view: SchedulingView, others: Sequence[DurationCurve]) -> tuple[Floats, Ints]:
    """When units become free, ascending: those of running actions and of the inelastic actions that
    start now.
    """
    seconds, units = list_least_durations(others)
    ends = np.concatenate((view.left_s, seconds))
    order = np.argsort(ends)
    return ends[order], np.concatenate((view.left_units, units))[order]


@jit_compile
def share_by_price(
    rows: Floats,
    after: Ints,
    state: int,
    free: int,
    ends: Floats,
    end_units: Ints,
    behind: Floats,
    capacity: float,
    patience_s: Floats,
) -> Ints:
    """The units for each row in order; 0 from the first row on that should wait.

    `ends` (ascending) and `end_units` are the future completions. `behind[i]` actions wait behind
    row i, which may still be delayed for `patience_s[i]`.
    """
    count, width = rows.shape
    width = min(width, after.shape[1])
    amounts = np.zeros(count, dtype=np.int64)
    for i in range(count):
        price = behind[i] / capacity
        chosen, least_cost = -1, np.inf
        for units in range(width):
            if after[state, units] < 0 or rows[i, units] == np.inf:
                continue
            cost = rows[i, units] * (1.0 + price * units)
            if cost < least_cost:
                chosen, least_cost = units, cost
        if chosen < 0:
            return amounts
        coming, idle, clock = free, 0.0, 0.0
        for j in range(len(ends)):
            idle += coming * (ends[j] - clock)
            clock = ends[j]
            before = coming
            coming += end_units[j]
            if clock >= least_cost or clock >= patience_s[i]:
                break
            for units in range(before + 1, min(coming, rows.shape[1] - 1) + 1):
                if rows[i, units] == np.inf:
                    continue
                cost = clock + rows[i, units] + price * (units * rows[i, units] + idle)
                if cost < least_cost - 1e-9:
                    return amounts
        amounts[i] = chosen
        state = after[state, chosen]
        free -= chosen
    return amounts


@dataclass(frozen=True, slots=True)
class PricedScheduling:
    """Inelastic candidates start with their fewest units. Elastic ones get, in order, the number of
    units with the least total cost. Units that short actions usually need stay free.
    """

    looks_ahead: bool = True
    may_delay: bool = True

    def decide(self, view: SchedulingView) -> list[int]:
        amounts = [curve.least for curve in view.candidates]
        elastic = [i for i, curve in enumerate(view.candidates) if curve.elastic]
        if not elastic:
            return amounts
        others = [curve for curve in view.candidates if not curve.elastic]
        state, free = view.topology.start, view.free
        for curve in others:
            state = int(view.topology.after[state, curve.least])
            free -= curve.least
        if view.topology.plain and view.short is not None:
            overdue = any(view.patience_s[i] <= 0 for i in elastic)
            kept = 0 if overdue else min(view.short.reserve(), free)
            state, free = state - kept, free - kept
        shares = self._share(view, elastic, others, state, free)
        for i, units in zip(elastic, shares, strict=True):
            amounts[i] = units
        return amounts

    @staticmethod
    def _share(
        view: SchedulingView,
        elastic: Sequence[int],
        others: Sequence[DurationCurve],
        state: int,
        free: int,
    ) -> list[int]:
        ends, end_units = list_completions(view, others)
        waiting = len(view.candidates) + view.waiting_behind
        behind = (
            np.array([waiting - i - 1 for i in elastic], dtype=np.float64) + view.expected_arrivals
        )
        curves = [view.candidates[i] for i in elastic]
        patience_s = np.array([view.patience_s[i] for i in elastic], dtype=np.float64)
        chosen: list[int] = share_by_price(
            stack_rows(curves),
            view.topology.after,
            state,
            free,
            ends,
            end_units,
            behind,
            float(max(view.capacity, 1)),
            patience_s,
        ).tolist()
        return chosen
