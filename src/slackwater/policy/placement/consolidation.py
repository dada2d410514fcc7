"""Consolidation: which jobs of thin groups should move together, and whether that is worth their
restarts.

A merger must save `LEAST_GAIN_H` hours of the group's nodes, and `LEAST_GAIN` of what the groups
cost until they are drained: the longer that is, the more it will differ from the forecast. One that
frees no group must save more: `LEAST_GAIN_OF_PART` if it takes only some jobs of another group, and
`LEAST_GAIN_ANEW` if it lays one group out anew. Only a group that is drained within `LAID_ANEW_H`
is laid out anew: to most others a job comes sooner, and moves the members back. Each restart costs
the job's nodes for the time that it takes and for `RESTART_RISK_H` more, since it may fail, and
other jobs may come that ask for another one. A job that was placed or moved rests for
`LEAST_GAP_S`, so that none is moved to and fro while others come and go. Decisions of one instant
are carried out together, so until the instant has passed another move of the job is free.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import Role
from slackwater.policy.columns import CAP_S, MAX_MEMBERS, ROUNDS, WORK_ROWS, Floats, Ints
from slackwater.policy.placement.cycle_fitting import MAX_ROUNDS, busiest_s, drain_cost
from slackwater.policy.placement.cycle_plan import FittedCycle
from slackwater.policy.placement.groups import GroupBook
from slackwater.policy.placement.layout import best_layout, fit_layout

MAX_TOGETHER = 5
LEAST_GAIN_H = 0.1
LEAST_GAIN = 0.035
LEAST_GAIN_OF_PART = 0.05
LEAST_GAIN_ANEW = 0.07
LAID_ANEW_H = 12.0
RESTART_RISK_H = 1.0
LEAST_GAP_S = 1800.0
_LAYOUT_WORK = 200  # of all but the fitting, of which 1,000 take some 0.3 ms


class ConsolidationCandidate(NamedTuple):
    """A job as a layout sees it; `here` is 1 if it has the train nodes already, with `pins`."""

    profile: JobProfile
    left: int
    budget_s: float
    here: float
    restart_s: float
    pins: int = 0
    cap_s: float = math.inf


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Pins, rounds and starts of each candidate, in order, and what the group then costs until it
    is drained.
    """

    pins: tuple[int, ...]
    cost: float
    cycle: FittedCycle


@dataclass(frozen=True, slots=True)
class Merger:
    """Jobs that should share the group at `row` under these pins; `gain` is what it saves, restarts
    paid.
    """

    row: int
    jobs: tuple[JobId, ...]
    layout: GroupLayout
    gain: float


class Consolidation:
    """Judges layouts and mergers over a book of groups; changes nothing."""

    def __init__(self, book: GroupBook, max_group_size: int) -> None:
        self._book = book
        self._most = min(max_group_size, MAX_TOGETHER)
        self.resting: dict[int, float] = {}  # groups that looks passed over, and until when
        self.work_left = 0  # that this look may still spend
        self.costs: dict[int, float] = {}  # of whole groups; whoever changes one clears them

    def group_cost(self, row: int, without: Sequence[JobId] = ()) -> float:
        """What a group costs until it is drained, if some members leave now."""
        table, group = self._book.table, self._book.groups[row]
        work, pins, cycle_s = table.work[row], table.pins[row], float(table.cycle_s[row])
        if not without:
            return self._drained(row, work, pins, len(group.jobs), cycle_s)
        stay = [i for i, job in enumerate(group.jobs) if job not in without]
        if not stay:
            return 0.0
        work, pins = work[:, stay].copy(), pins[stay].copy()
        cycle_s = min(cycle_s, busiest_s(work, pins, len(stay)))
        return self._drained(row, work, pins, len(stay), cycle_s)

    def _whole_cost(self, row: int) -> float:
        if row not in self.costs:
            self.costs[row] = self.group_cost(row)
        return self.costs[row]

    def cost_under(self, row: int, cycle: FittedCycle) -> float:
        """What a group would cost until it is drained in another cycle on the same nodes."""
        table, group = self._book.table, self._book.groups[row]
        count = len(group.jobs)
        work = table.work[row][:, :count].copy()
        work[ROUNDS] = cycle.rounds
        return self._drained(row, work, table.pins[row], count, cycle.period_s)

    def _drained(self, row: int, work: Floats, pins: Ints, count: int, cycle_s: float) -> float:
        worth_per_h = self._book.ledger.worth_per_h
        train_nodes = len(self._book.groups[row].train)
        prices = (train_nodes, worth_per_h(Role.ROLLOUT), worth_per_h(Role.TRAIN))
        return drain_cost(work, pins, count, cycle_s, np.zeros(count), prices)

    def layout(
        self,
        candidates: Sequence[ConsolidationCandidate],
        row: int | None,
        train_nodes: int,
        to_beat: float,
    ) -> GroupLayout | None:
        """The cheapest layout on the group's train nodes (or new ones) that costs less than
        `to_beat`.
        """
        book = self._book
        columns = [self._column(candidate, train_nodes) for candidate in candidates]
        jobs = np.ascontiguousarray(np.array(columns).T)
        current: Ints = np.array([candidate.pins for candidate in candidates], np.int64)
        room = book.room(MAX_MEMBERS, to_beat)
        mask = 0 if row is None else int(book.table.node_mask[row])
        pins = np.zeros(len(candidates), np.int64)
        spent = np.zeros(1, np.int64)
        cost = best_layout(jobs, current, mask, train_nodes, room, RESTART_RISK_H, pins, spent)
        self.work_left -= int(spent[0]) + _LAYOUT_WORK
        if not np.isfinite(cost):
            return None
        work, delay_s = np.zeros((WORK_ROWS, len(candidates))), np.zeros(len(candidates))
        starts = np.zeros((len(candidates), 2, MAX_ROUNDS))
        period_s = fit_layout(jobs, current, pins, work, delay_s, starts, spent)
        cycle = FittedCycle(float(period_s), work[ROUNDS], starts)
        return GroupLayout(tuple(int(pin) for pin in pins), float(cost), cycle)

    def _column(self, candidate: ConsolidationCandidate, train_nodes: int) -> tuple[float, ...]:
        profile = candidate.profile
        local_s, train_s = self._book.lengths_on_train_nodes_s(profile, train_nodes)
        return (
            profile.rollout_s,
            local_s,
            train_s,
            profile.sync_s,
            candidate.budget_s,
            candidate.left,
            profile.rollout_state_gb,
            profile.train_state_gb,
            profile.rollout_nodes,
            candidate.restart_s,
            candidate.here,
            candidate.cap_s,
        )

    def candidate(self, job: JobId, now_s: float, *, here: bool) -> ConsolidationCandidate:
        """A placed job."""
        member = self._book.members[job]
        pins = member.pins if here else 0
        return ConsolidationCandidate(
            profile=member.spec.profile,
            left=member.left,
            budget_s=member.budget_s,
            here=float(here),
            restart_s=math.inf if self._rests(job, now_s) else restart_s(self._book, job, now_s),
            pins=pins,
            cap_s=float(self._book.table.work[member.row, CAP_S, member.index]),
        )

    def merge(
        self, incoming: Sequence[JobId], row: int, now_s: float, to_beat: float = 0.0
    ) -> Merger | None:
        """Bring jobs of another group into the one at `row` (or none: lay that one out anew), if
        that gains more than `to_beat`.
        """
        book = self._book
        here = book.groups[row].jobs
        if any(self._rests(job, now_s) for job in incoming):
            return None
        if len(here) + len(incoming) > self._most or self._train_share(here, incoming, row) > 1:
            return None
        if not incoming and self._alone_h(here) > LAID_ANEW_H:
            return None
        before = self._whole_cost(row)
        after, least_gain = 0.0, LEAST_GAIN if incoming else LEAST_GAIN_ANEW
        if incoming:
            source = book.members[incoming[0]].row
            before += self._whole_cost(source)
            if len(incoming) < len(book.groups[source].jobs):
                after, least_gain = self.group_cost(source, incoming), LEAST_GAIN_OF_PART
        jobs = (*here, *incoming)
        candidates = [self.candidate(job, now_s, here=job in here) for job in jobs]
        group = book.groups[row]
        train_nodes = len(group.train)
        least = LEAST_GAIN_H * book.worth_per_h(len(group.rollout), train_nodes)
        least += least_gain * before
        layout = self.layout(candidates, row, train_nodes, before - after - max(to_beat, least))
        if layout is None:
            return None
        return Merger(row, jobs, layout, gain=before - after - layout.cost)

    def _alone_h(self, jobs: Sequence[JobId]) -> float:
        """How long the longest of them would take alone."""
        members = [self._book.members[job] for job in jobs]
        return max(member.left * member.spec.profile.solo_s for member in members) / 3600

    def _rests(self, job: JobId, now_s: float) -> bool:
        """Placed or moved lately, or its SLO bears no move now."""
        member = self._book.members[job]
        if member.moved_s == now_s:
            return False
        rested_s = member.moved_s + LEAST_GAP_S
        if member.may_move and now_s < rested_s:
            self.resting[member.row] = min(rested_s, self.resting.get(member.row, rested_s))
        return not member.may_move or now_s < rested_s

    def _train_share(self, here: Sequence[JobId], incoming: Sequence[JobId], row: int) -> float:
        """Part of the train nodes' time that these jobs need at least; above 1 no layout
        can work.
        """
        book, share = self._book, 0.0
        nodes = len(book.groups[row].train)
        for job in (*here, *incoming):
            member = book.members[job]
            _, train_s = book.lengths_on_train_nodes_s(member.spec.profile, nodes)
            share += train_s * member.left / max(member.budget_s, 1e-9)
        return share

    def with_newcomer(
        self, newcomer: ConsolidationCandidate, row: int, now_s: float, to_beat: float
    ) -> GroupLayout | None:
        """A group on new train nodes for an arriving job and all members of a thin group, who move
        there.
        """
        book = self._book
        jobs = book.groups[row].jobs
        if len(jobs) + 1 > self._most or any(self._rests(job, now_s) for job in jobs):
            return None
        candidates = [newcomer, *(self.candidate(job, now_s, here=False) for job in jobs)]
        before = self.group_cost(row)
        layout = self.layout(candidates, None, newcomer.profile.train_nodes, before + to_beat)
        return None if layout is None else replace(layout, cost=layout.cost - before)


def newcomer(job: JobSpec, budget_s: float, cap_s: float) -> ConsolidationCandidate:
    """An arriving job: it takes any nodes without a restart."""
    return ConsolidationCandidate(
        profile=job.profile,
        left=job.iterations,
        budget_s=budget_s,
        here=0.0,
        restart_s=0.0,
        cap_s=cap_s,
    )


def restart_s(book: GroupBook, job: JobId, now_s: float) -> float:
    """Time that a move takes from a job: the restart, and half an iteration that is done again on
    average; none in the instant in which it was placed or moved.
    """
    member = book.members[job]
    profile = member.spec.profile
    return 0.0 if member.moved_s == now_s else book.fleet.move.of(profile) + profile.solo_s / 2
