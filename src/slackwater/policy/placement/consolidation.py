"""Consolidation: which jobs of small groups should share one group, and whether the saving pays
for their restarts.

The cost of a group is the rent of its nodes until its last job ends. A merger must save at least
`MIN_GAIN_H` hours of the target group's rent, and the share `MIN_GAIN` of both groups' cost, since
a longer forecast is less certain. A merger that frees no group must save more: `MIN_PARTIAL_GAIN`
if it takes only one job of another group, `MIN_RELAYOUT_GAIN` if it only changes the layout inside
one group. The layout changes only in groups that end within `MAX_RELAYOUT_LIFE_H`: other groups
usually receive a new job first, which moves the members back.

Each restart costs the rent of the job's nodes while it restarts and for `RESTART_RISK_H` more,
because it may fail and because later arrivals may ask for another move. After a placement or a move
a job stays for `MIN_MOVE_GAP_S`, so that jobs do not move back and forth as others come and go. All
decisions of one instant are executed together, so a second move in the same instant is free.
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
from slackwater.policy.placement.cycle_fitting import MAX_ROUNDS, drain_cost, min_cycle_s
from slackwater.policy.placement.cycle_plan import FittedCycle
from slackwater.policy.placement.groups import GroupRegistry
from slackwater.policy.placement.layout import best_layout, fit_layout

MAX_MERGED_JOBS = 5
MIN_GAIN_H = 0.1
MIN_GAIN = 0.035
MIN_PARTIAL_GAIN = 0.05
MIN_RELAYOUT_GAIN = 0.07
MAX_RELAYOUT_LIFE_H = 12.0
RESTART_RISK_H = 1.0
MIN_MOVE_GAP_S = 1800.0
# Search effort of a layout besides fitting its cycles, in the units that `fit_cycle` counts: 1,000
# of them take about 0.3 ms.
_LAYOUT_WORK = 200


class ConsolidationCandidate(NamedTuple):
    """A job of a possible layout. `here` is 1 if the job is on the train nodes already, with `pins`
    as its rollout nodes.
    """

    profile: JobProfile
    left: int
    budget_s: float
    here: float
    restart_s: float
    pins: int = 0
    cap_s: float = math.inf


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The rollout nodes (`pins`) of each candidate, the group's cycle, and the cost of the group
    until its last job ends.
    """

    pins: tuple[int, ...]
    cost: float
    cycle: FittedCycle


@dataclass(frozen=True, slots=True)
class Merger:
    """Jobs that should share the group at `row` in this layout. `gain` is the saving after the cost
    of restarts.
    """

    row: int
    jobs: tuple[JobId, ...]
    layout: GroupLayout
    gain: float


class Consolidation:
    """Evaluates layouts and mergers of groups. It changes no group."""

    def __init__(self, registry: GroupRegistry, max_group_size: int) -> None:
        self._registry = registry
        self._most = min(max_group_size, MAX_MERGED_JOBS)
        # By row: when a group that the search skipped may be looked at again.
        self.resting: dict[int, float] = {}
        self.work_left = 0  # search effort that is left in this call
        self.costs: dict[int, float] = {}  # cache by row; clear it after changing a group

    def group_cost(self, row: int, without: Sequence[JobId] = ()) -> float:
        """The cost of a group until its last job ends, if the members `without` leave now."""
        table, group = self._registry.table, self._registry.groups[row]
        work, pins, cycle_s = table.work[row], table.pins[row], float(table.cycle_s[row])
        if not without:
            return self._drain_cost(row, work, pins, len(group.jobs), cycle_s)
        stay = [i for i, job in enumerate(group.jobs) if job not in without]
        if not stay:
            return 0.0
        work, pins = work[:, stay].copy(), pins[stay].copy()
        cycle_s = min(cycle_s, min_cycle_s(work, pins, len(stay)))
        return self._drain_cost(row, work, pins, len(stay), cycle_s)

    def _whole_cost(self, row: int) -> float:
        if row not in self.costs:
            self.costs[row] = self.group_cost(row)
        return self.costs[row]

    def group_cost_in_cycle(self, row: int, cycle: FittedCycle) -> float:
        """The cost of a group until its last job ends, if it used another cycle on its nodes."""
        table, group = self._registry.table, self._registry.groups[row]
        count = len(group.jobs)
        work = table.work[row][:, :count].copy()
        work[ROUNDS] = cycle.rounds
        return self._drain_cost(row, work, table.pins[row], count, cycle.period_s)

    def _drain_cost(self, row: int, work: Floats, pins: Ints, count: int, cycle_s: float) -> float:
        worth_per_h = self._registry.ledger.worth_per_h
        train_nodes = len(self._registry.groups[row].train)
        prices = (train_nodes, worth_per_h(Role.ROLLOUT), worth_per_h(Role.TRAIN))
        return drain_cost(work, pins, count, cycle_s, np.zeros(count), prices)

    def find_layout(
        self,
        candidates: Sequence[ConsolidationCandidate],
        row: int | None,
        train_nodes: int,
        cost_to_beat: float,
    ) -> GroupLayout | None:
        """The cheapest layout on the train nodes of the group at `row`, or on new ones if `row` is
        None. None if no layout costs less than `cost_to_beat`.
        """
        registry = self._registry
        columns = [self._make_column(candidate, train_nodes) for candidate in candidates]
        jobs = np.ascontiguousarray(np.array(columns).T)
        current: Ints = np.array([candidate.pins for candidate in candidates], np.int64)
        limits = registry.scan_limits(MAX_MEMBERS, cost_to_beat)
        mask = 0 if row is None else int(registry.table.node_mask[row])
        pins = np.zeros(len(candidates), np.int64)
        spent = np.zeros(1, np.int64)
        cost = best_layout(jobs, current, mask, train_nodes, limits, RESTART_RISK_H, pins, spent)
        self.work_left -= int(spent[0]) + _LAYOUT_WORK
        if not np.isfinite(cost):
            return None
        work, delay_s = np.zeros((WORK_ROWS, len(candidates))), np.zeros(len(candidates))
        starts = np.zeros((len(candidates), 2, MAX_ROUNDS))
        period_s = fit_layout(jobs, current, pins, work, delay_s, starts, spent)
        cycle = FittedCycle(float(period_s), work[ROUNDS], starts)
        return GroupLayout(tuple(int(pin) for pin in pins), float(cost), cycle)

    def _make_column(
        self, candidate: ConsolidationCandidate, train_nodes: int
    ) -> tuple[float, ...]:
        profile = candidate.profile
        local_s, train_s = self._registry.lengths_on_train_nodes_s(profile, train_nodes)
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

    def make_candidate(self, job: JobId, now_s: float, *, here: bool) -> ConsolidationCandidate:
        member = self._registry.members[job]
        pins = member.pins if here else 0
        return ConsolidationCandidate(
            profile=member.spec.profile,
            left=member.left,
            budget_s=member.budget_s,
            here=float(here),
            restart_s=math.inf
            if self._is_resting(job, now_s)
            else restart_s(self._registry, job, now_s),
            pins=pins,
            cap_s=float(self._registry.table.work[member.row, CAP_S, member.index]),
        )

    def find_merger(
        self, incoming: Sequence[JobId], row: int, now_s: float, gain_to_beat: float = 0.0
    ) -> Merger | None:
        """The merger that moves jobs of another group into the group at `row`, if it gains more
        than `gain_to_beat`. Without incoming jobs it changes the layout of that group.
        """
        registry = self._registry
        here = registry.groups[row].jobs
        if any(self._is_resting(job, now_s) for job in incoming):
            return None
        if len(here) + len(incoming) > self._most or self._train_share(here, incoming, row) > 1:
            return None
        if not incoming and self._longest_solo_h(here) > MAX_RELAYOUT_LIFE_H:
            return None
        before = self._whole_cost(row)
        after, least_gain = 0.0, MIN_GAIN if incoming else MIN_RELAYOUT_GAIN
        if incoming:
            source = registry.members[incoming[0]].row
            before += self._whole_cost(source)
            if len(incoming) < len(registry.groups[source].jobs):
                after, least_gain = self.group_cost(source, incoming), MIN_PARTIAL_GAIN
        jobs = (*here, *incoming)
        candidates = [self.make_candidate(job, now_s, here=job in here) for job in jobs]
        group = registry.groups[row]
        train_nodes = len(group.train)
        least = MIN_GAIN_H * registry.worth_per_h(len(group.rollout), train_nodes)
        least += least_gain * before
        layout = self.find_layout(
            candidates, row, train_nodes, before - after - max(gain_to_beat, least)
        )
        if layout is None:
            return None
        return Merger(row, jobs, layout, gain=before - after - layout.cost)

    def _longest_solo_h(self, jobs: Sequence[JobId]) -> float:
        """The longest remaining time of these jobs if each ran alone."""
        members = [self._registry.members[job] for job in jobs]
        return max(member.left * member.spec.profile.solo_s for member in members) / 3600

    def _is_resting(self, job: JobId, now_s: float) -> bool:
        """Whether a job must stay: it was placed or moved lately, or its SLO allows no move now. If
        only time is missing, note in `resting` when its group may be looked at again.
        """
        member = self._registry.members[job]
        if member.moved_s == now_s:
            return False
        rested_s = member.moved_s + MIN_MOVE_GAP_S
        if member.may_move and now_s < rested_s:
            self.resting[member.row] = min(rested_s, self.resting.get(member.row, rested_s))
        return not member.may_move or now_s < rested_s

    def _train_share(self, here: Sequence[JobId], incoming: Sequence[JobId], row: int) -> float:
        """The share of the train nodes' time that these jobs need at least. Above 1 no layout is
        feasible.
        """
        registry, share = self._registry, 0.0
        nodes = len(registry.groups[row].train)
        for job in (*here, *incoming):
            member = registry.members[job]
            _, train_s = registry.lengths_on_train_nodes_s(member.spec.profile, nodes)
            share += train_s * member.left / max(member.budget_s, 1e-9)
        return share

    def lay_out_with_arrival(
        self,
        arrival: ConsolidationCandidate,
        row: int,
        now_s: float,
        cost_to_beat: float,
    ) -> GroupLayout | None:
        """The layout of a new group for an arriving job and all members of the group at `row`, who
        move there. Its cost is what it adds to the cost of that group.
        """
        registry = self._registry
        jobs = registry.groups[row].jobs
        if len(jobs) + 1 > self._most or any(self._is_resting(job, now_s) for job in jobs):
            return None
        candidates = [
            arrival,
            *(self.make_candidate(job, now_s, here=False) for job in jobs),
        ]
        before = self.group_cost(row)
        layout = self.find_layout(
            candidates, None, arrival.profile.train_nodes, before + cost_to_beat
        )
        return None if layout is None else replace(layout, cost=layout.cost - before)


def make_arriving_candidate(job: JobSpec, budget_s: float, cap_s: float) -> ConsolidationCandidate:
    """Describe an arriving job, which can take any nodes without a restart."""
    return ConsolidationCandidate(
        profile=job.profile,
        left=job.iterations,
        budget_s=budget_s,
        here=0.0,
        restart_s=0.0,
        cap_s=cap_s,
    )


def restart_s(registry: GroupRegistry, job: JobId, now_s: float) -> float:
    """The time that a job loses by a move: the restart, and half an iteration, which on average is
    repeated. None in the instant in which the job was placed or moved.
    """
    member = registry.members[job]
    profile = member.spec.profile
    return (
        0.0
        if member.moved_s == now_s
        else registry.fleet.move.restart_s(profile) + profile.solo_s / 2
    )
