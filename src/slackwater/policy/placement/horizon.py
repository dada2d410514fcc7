"""Horizon placement: fit a job's periodic trace into the free windows of node groups over a cyclic
horizon (PlexRL 4.3).

The horizon is a ring of 28,800 one-second slots. A job's iteration recurs a whole number of times
in it. Its period, the horizon divided by that number, is at least its own cycle, and short enough
that the share of time in which the job waits stays within its duty-ratio bound (PlexRL 7.2) and its
SLO. The job is pinned to a node group at the smallest shift at which all its segments fall into
free windows. All its segments are then reserved at once. A job without a trace (cold start) has its
own nodes until one cycle was profiled. Then it is packed, by its declared lengths or (`profiled`)
by the measured ones.

On one node group the number of recurrences of one job divides that of the other, so that the
distances of their windows are the same over the whole horizon.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from slackwater.model.errors import ConfigError
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import Role
from slackwater.model.placement import Placement, Refusal, Strategy
from slackwater.policy.columns import MAX_MEMBERS, MAX_ROLLOUT_NODES, Floats
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.grouped import GroupedPlacement
from slackwater.policy.placement.groups import GroupChoice, bits, choose_isolated
from slackwater.policy.placement.horizon_ring import (
    HORIZON_S,
    FreeNodes,
    add_busy_windows,
    smallest_shift,
)
from slackwater.policy.placement.interface import JobProgress

_GROUPS_TRIED = 24
_PERIODS_TRIED = 8
_NO_WINDOWS: Floats = np.zeros((0, 2))


@dataclass(frozen=True, slots=True)
class Trace:
    """The segments of a placed job: it recurs `times` times in the horizon, and its first rollout
    begins at `shift_s`.
    """

    shift_s: float
    times: int
    roll_s: float
    train_s: float

    @property
    def period_s(self) -> float:
        return HORIZON_S / self.times


@dataclass(frozen=True, slots=True)
class _HorizonFit:
    row: int
    pins: int
    new_nodes: int
    trace: Trace


class HorizonPlacement(GroupedPlacement):
    """`pack` fills the busiest node group first. `spread` takes free nodes first, then the least
    busy group.

    `waiting_bound` is the largest share of time that a job may wait; its SLO is a bound too. With
    `cold_start` an arriving job has no trace yet. With `profiled` its trace is the measured one.
    """

    name = "horizon"

    def __init__(
        self,
        fleet: FleetView,
        max_group_size: int = MAX_MEMBERS,
        mode: Literal["pack", "spread"] = "pack",
        waiting_bound: float = 0.5,
        cold_start: bool = False,
        profiled: bool = False,
    ) -> None:
        super().__init__(fleet, max_group_size)
        if not 0 <= waiting_bound < 1:
            raise ConfigError.of("waiting_bound", waiting_bound, "must be at least 0 and below 1")
        self._mode = mode
        self._waiting_bound = waiting_bound
        self._cold_start = cold_start or profiled
        self._profiled = profiled
        self._measured: dict[JobId, tuple[float, float]] = {}
        self._free = FreeNodes(fleet.train.max_nodes)
        self._duty: dict[int, float] = {}
        self._windows: dict[int, dict[int | None, Floats]] = {}
        self._traces: dict[JobId, Trace] = {}
        self._unprofiled: dict[JobId, int] = {}
        self._chosen_trace: Trace | None = None

    def observe(self, progress: Sequence[JobProgress], waiting: Sequence[JobSpec] = ()) -> None:
        """Record the progress of jobs and the measured lengths of their phases."""
        super().observe(progress, waiting)
        for report in progress:
            if report.rollout_s is not None and report.train_s is not None:
                self._measured[report.job] = (report.rollout_s, report.train_s)

    def place(self, job: JobSpec, now_s: float) -> Placement | Refusal:
        """Find nodes for an arriving job, and reserve its windows in the horizon."""
        placed = super().place(job, now_s)
        if isinstance(placed, Placement):
            self._reserve(job.job)
            if self._cold_start:
                self._unprofiled[job.job] = job.iterations
        return placed

    def _choose(self, job: JobSpec, now_s: float) -> GroupChoice | None:
        del now_s
        self._chosen_trace = None
        alone = choose_isolated(
            self.registry, job.profile, "no node group has windows for its trace"
        )
        if self._cold_start or (self._mode == "spread" and alone is not None):
            return alone
        fit = self._find_fit(job)
        if fit is None:
            return alone
        self._chosen_trace = fit.trace
        return self._as_choice(fit)

    def _as_choice(self, fit: _HorizonFit) -> GroupChoice:
        group = self.registry.groups[fit.row].group
        reason = (
            f"its trace fits {group} shifted by {fit.trace.shift_s:.0f} s, one in "
            f"{fit.trace.period_s:.0f} s"
        )
        strategy = Strategy.SCALE if fit.new_nodes else Strategy.PACK
        return GroupChoice(fit.row, fit.pins, fit.new_nodes, 0, strategy, reason)

    def _times(self, job: JobSpec, train_nodes: int) -> tuple[int, int]:
        """The fewest recurrences that the job's bounds allow, and the most that its cycle
        allows.
        """
        profile = job.profile
        cycle_s = profile.rollout_s + profile.train_s_on(train_nodes) + profile.sync_s
        slowest_s = min(job.slo * profile.solo_s, cycle_s / (1 - self._waiting_bound))
        return int(np.ceil(HORIZON_S / slowest_s - 1e-9)), int(HORIZON_S / cycle_s + 1e-9)

    def _find_fit(self, job: JobSpec, but: int = -1) -> _HorizonFit | None:
        """The first node group in order of preference into whose free windows the job fits, without
        the one at row `but`.
        """
        rows = [row for row in self._candidates(job) if row != but]
        for new_nodes in (0, job.profile.rollout_nodes):
            if new_nodes > self.registry.ledger.free(Role.ROLLOUT):
                break
            for row in rows[:_GROUPS_TRIED]:
                fit = self._fit_group(job, row, new_nodes)
                if fit is not None:
                    return fit
        return None

    def _candidates(self, job: JobSpec) -> list[int]:
        """The groups with time and memory left on their train nodes, in order of preference."""
        table, profile = self.registry.table, job.profile
        rows = table.rows
        nodes = np.maximum(table.train_nodes[:rows], 1)
        train_s = profile.train_s_on(1) / nodes
        cycle_s = profile.rollout_s + train_s + profile.sync_s
        slowest_s = np.minimum(job.slo * profile.solo_s, cycle_s / (1 - self._waiting_bound))
        fewest = np.ceil(HORIZON_S / slowest_s - 1e-9)
        duty = np.array([self._duty.get(row, 0.0) for row in range(rows)])
        fits = (
            (table.members[:rows] > 0)
            & (table.members[:rows] < self.max_group_size)
            & (fewest <= np.floor(HORIZON_S / cycle_s + 1e-9))
            & (duty + train_s * fewest / HORIZON_S <= 1)
            & (
                table.train_gb[:rows] + profile.train_state_gb
                <= self.fleet.train.node_type.host_memory_gb
            )
        )
        order = np.argsort(duty if self._mode == "spread" else -duty, kind="stable")
        return [int(row) for row in order if fits[row]]

    def _fit_group(self, job: JobSpec, row: int, new_nodes: int) -> _HorizonFit | None:
        group, profile = self.registry.groups[row], job.profile
        fewest, most = self._times(job, len(group.train))
        resident = {self._traces[member].times for member in group.jobs if member in self._traces}
        times = _commensurate(fewest, most, resident)
        train_s = profile.train_s_on(len(group.train))
        train_busy = self._busy(row, None)
        for pins in self._pinnings(job, row, new_nodes):
            roll_busy = self._busy(row, pins)
            for count in times:
                shift = smallest_shift(
                    roll_busy, train_busy, profile.rollout_s, train_s, count, float(HORIZON_S)
                )
                trace = Trace(float(shift), count, profile.rollout_s, train_s)
                if shift >= 0 and self._gang_is_free(trace, len(group.train)):
                    return _HorizonFit(row, pins, new_nodes, trace)
        return None

    def _gang_is_free(self, trace: Trace, nodes: int) -> bool:
        """Whether the pool has `nodes` nodes free in the first train window (PlexRL 5.2.1)."""
        start = int(trace.shift_s + trace.roll_s)
        return self._free.min_free(start, max(int(trace.train_s), 1)) >= nodes

    def _pinnings(self, job: JobSpec, row: int, new_nodes: int) -> list[int]:
        """Sets of the group's rollout nodes to try: those with memory, the least busy first. An
        empty set if new nodes are rented.
        """
        group, profile = self.registry.groups[row], job.profile
        if new_nodes:
            return [0] if len(group.rollout) + new_nodes <= MAX_ROLLOUT_NODES else []
        memory_gb = self.fleet.rollout.node_type.host_memory_gb
        roomy = [
            (len(self._busy(row, 1 << slot)), slot)
            for slot in group.rollout
            if self.registry.table.node_gb[row, slot] + profile.rollout_state_gb <= memory_gb
        ]
        slots = [slot for _, slot in sorted(roomy)]
        wanted = profile.rollout_nodes
        return [
            sum(1 << slot for slot in slots[first : first + wanted])
            for first in range(len(slots) - wanted + 1)
        ]

    def _busy(self, row: int, pins: int | None) -> Floats:
        """The busy windows of a group's train nodes (`pins` is None), or the union of those of some
        rollout nodes. Cached until the group changes.
        """
        kept = self._windows.setdefault(row, {})
        if pins not in kept:
            kept[pins] = self._collect_windows(row, pins)
        return kept[pins]

    def _collect_windows(self, row: int, pins: int | None) -> Floats:
        busy = _NO_WINDOWS
        for job in self.registry.groups[row].jobs:
            trace = self._traces.get(job)
            if trace is None:
                continue  # Its windows are released, because it is about to be fitted again.
            if pins is None:
                start, length = trace.shift_s + trace.roll_s, trace.train_s
            elif self.registry.members[job].pins & pins:
                start, length = trace.shift_s, trace.roll_s
            else:
                continue
            busy = add_busy_windows(busy, start, length, trace.times, HORIZON_S)
        if pins is not None and len(bits(pins)) > 1:
            busy[:, 1] = np.maximum.accumulate(busy[:, 1])
        return busy

    def _reserve(self, job: JobId) -> None:
        member = self.registry.members[job]
        trace = self._chosen_trace
        if trace is None:
            nodes = len(self.registry.groups[member.row].train)
            times = max(self._times(member.spec, nodes)[1], 1)
            profile = member.spec.profile
            trace = Trace(0.0, times, profile.rollout_s, profile.train_s_on(nodes))
        self._traces[job] = trace
        self._change_footprint(job, trace, -1)

    def _change_footprint(self, job: JobId, trace: Trace, sign: int) -> None:
        """Reserve all windows of a job in the horizon (sign -1), or release them (sign 1)."""
        row = self.registry.members[job].row
        nodes = len(self.registry.groups[row].train)
        self._windows.pop(row, None)
        self._duty[row] = self._duty.get(row, 0.0) - sign * trace.train_s * trace.times / HORIZON_S
        if len(self.registry.groups[row].jobs) == 1 and sign > 0:
            del self._duty[row]
        for turn in range(trace.times):
            start = int(trace.shift_s + trace.roll_s + turn * trace.period_s)
            self._free.add(start, max(int(trace.train_s), 1), sign * nodes)

    def _release(self, job: JobId) -> None:
        self._change_footprint(job, self._traces.pop(job), 1)

    def remove(self, job: JobId) -> None:
        """Forget a job and release its windows."""
        self._release(job)
        self._unprofiled.pop(job, None)
        self._measured.pop(job, None)
        super().remove(job)

    def isolate(self, job: JobId, now_s: float) -> Sequence[Placement]:
        self._release(job)
        moves = super().isolate(job, now_s)
        self._chosen_trace = None
        self._reserve(job)
        return moves

    def revise(self, job: JobId, profile: JobProfile, now_s: float) -> Sequence[Placement]:
        """Take over a drifted profile. Its trace no longer fits its windows, so it is fitted
        again.
        """
        self._release(job)
        super().revise(job, profile, now_s)
        self._chosen_trace = None
        moved = self._repack(job)
        self._reserve(job)
        return [self.registry.placement(job)] if moved else ()

    def rebalance(self, now_s: float, profile: JobProfile | None = None) -> Sequence[Placement]:
        """Pack jobs whose first cycle has been profiled."""
        del now_s, profile
        moves = []
        for job, iterations in list(self._unprofiled.items()):
            if self.registry.members[job].left >= iterations:
                continue
            if self._profiled and job not in self._measured:
                continue
            del self._unprofiled[job]
            self._release(job)
            if self._profiled:
                rollout_s, train_s = self._measured[job]
                declared = self.registry.members[job].spec.profile
                self.registry.revise(job, replace(declared, rollout_s=rollout_s, train_s=train_s))
            self._chosen_trace = None
            if self._repack(job):
                moves.append(job)
            self._reserve(job)
        return [self.registry.placement(job) for job in moves]

    def _repack(self, job: JobId) -> bool:
        member = self.registry.members[job]
        alone = len(self.registry.groups[member.row].jobs) == 1
        assert job not in self._traces, f"{job} still holds windows"
        fit = self._find_fit(member.spec, but=member.row)
        self._windows.pop(member.row, None)
        if fit is not None:
            self._chosen_trace = fit.trace
            self.registry.move(job, self._as_choice(fit))
            return True
        choice = None if alone else choose_isolated(self.registry, member.spec.profile, "drifted")
        if choice is None:
            return False
        self.registry.move(job, choice)
        return True


def _commensurate(fewest: int, most: int, resident: set[int]) -> list[int]:
    """The numbers of recurrences to try, largest first: each divides the number of every resident
    job, or is a multiple of it. In an empty group, the largest possible one.
    """
    if not resident:
        return [most] if fewest <= most else []
    fits = [
        times
        for times in range(most, fewest - 1, -1)
        if times and all(times % other == 0 or other % times == 0 for other in resident)
    ]
    return fits[:_PERIODS_TRIED]
