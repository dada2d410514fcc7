"""Interleaving: jobs with different periods share nodes in one cycle, within the time that their
SLOs leave.

It relaxes group placement in three ways and keeps its guarantees. A job makes as many iterations
per cycle as its bound needs, not exactly one. A group takes members until their bounds are reached,
not until it is saturated. A job's bound is its budget, the time that its SLO leaves for the
iterations left; so time saved by short iterations can be spent on sharing or on a move. Rollouts
may also run in the idle time of train nodes. An arriving job gets the place that adds the least
rent until its group's last job ends. Jobs of small groups move together when that saves more than
the restarts cost.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Placement, Refusal, Strategy
from slackwater.policy.columns import MAX_MEMBERS
from slackwater.policy.placement.arrival import make_arriving_job
from slackwater.policy.placement.consolidation import Consolidation, Merger, make_arriving_candidate
from slackwater.policy.placement.cycle_plan import (
    adopt_cycle,
    fit_group,
    plan_keeps_caps,
    plan_period_s,
)
from slackwater.policy.placement.draining import (
    DrainBound,
    admission_order,
    estimate_drain,
    solo_duration_s,
)
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.grouped import GroupedPlacement
from slackwater.policy.placement.groups import GroupChoice, choose_isolated
from slackwater.policy.placement.interface import JobProgress
from slackwater.policy.placement.interleaving_scan import scan_cycles, train_shares
from slackwater.policy.placement.merging import execute_merger, sharing_strategy

_MERGERS_PER_SEARCH = 4
_SMALL_GROUPS_TRIED = 24  # groups that one search looks at
_FOLLOWERS_TRIED = 6  # groups that could join an arriving job on new nodes: about 0.2 ms each
# Search effort for the place of an arrival, and of one call of the merger search: a few
# milliseconds each.
_ARRIVAL_WORK = 8_000
_SEARCH_WORK = 4_000


@dataclass(slots=True)
class _MergerSearch:
    """A search for mergers that several calls share: the pairs of incoming jobs and target group
    that are left, the groups whose change caused the search, how many mergers it may still execute,
    and the best merger so far.
    """

    pairs: deque[tuple[tuple[JobId, ...], int]]
    changed: set[int]
    mergers: int
    best: Merger | None = None
    best_pair: tuple[tuple[JobId, ...], int] | None = None


class Interleaving(GroupedPlacement):
    """The default policy (see the module)."""

    name = "interleaving"

    def __init__(self, fleet: FleetView, max_group_size: int = MAX_MEMBERS) -> None:
        super().__init__(fleet, max_group_size)
        self._consolidation = Consolidation(self.registry, max_group_size)
        self._changed: set[int] = set()
        self._departed_from: set[int] = set()  # groups that members left since the last rebalance
        self._search: _MergerSearch | None = None
        self._waiting: frozenset[JobId] = frozenset()
        self._drain = DrainBound(np.inf, None)

    def observe(self, progress: Sequence[JobProgress], waiting: Sequence[JobSpec] = ()) -> None:
        """Record the progress of jobs. On an owned fleet no budget may reach beyond the estimated
        end of all work.
        """
        super().observe(progress, waiting)
        self._waiting = frozenset(spec.job for spec in waiting)
        if self.fleet.owned:
            placed = [
                (member.left, member.spec.profile) for member in self.registry.members.values()
            ]
            self._drain = estimate_drain(placed, waiting, self.fleet.train.max_nodes)
            self.registry.cap_budgets(self._drain.bound_s)

    def admission_order(self, waiting: Sequence[JobSpec]) -> Sequence[JobId]:
        """Order of arrival; on an owned fleet first the jobs that might end last, then the
        shortest.
        """
        if not self.fleet.owned:
            return super().admission_order(waiting)
        return admission_order(waiting, self._drain.bound_s)

    def _budget_s(self, job: JobSpec) -> float:
        return min(super()._budget_s(job), max(self._drain.bound_s, solo_duration_s(job)))

    def _explain_refusal(self, job: JobSpec) -> str:
        if self._must_yield(job):
            return f"the room is kept for {self._drain.critical_job}, which would end last of all"
        return super()._explain_refusal(job)

    def _must_yield(self, job: JobSpec) -> bool:
        return self._drain.critical_job not in (None, job.job)

    def _explain_infeasible(self, profile: JobProfile) -> str | None:
        apart = self.fleet.explain_infeasible(profile)
        return apart if apart and self.fleet.explain_infeasible_local(profile) else None

    def place(self, job: JobSpec, now_s: float) -> Placement | Refusal:
        """Find nodes for an arriving job. Its placement carries the group's new plan."""
        placed = super().place(job, now_s)
        if isinstance(placed, Refusal):
            return placed
        member = self.registry.members[job.job]
        member.moved_s = now_s
        self._fit_plan(member.row)
        return self.registry.placement(job.job)

    def _fit_plan(self, row: int) -> None:
        cycle = fit_group(self.registry, row)
        assert cycle is not None, f"{self.registry.groups[row].group} was admitted without a cycle"
        adopt_cycle(self.registry, row, self.registry.groups[row].jobs, cycle)
        self._changed.add(row)

    def _choose(self, job: JobSpec, now_s: float) -> GroupChoice | None:
        profile, left = job.profile, job.iterations
        if self._must_yield(job):
            return None
        if self.fleet.owned and self._waiting <= {job.job}:
            unshared = choose_isolated(
                self.registry, profile, "its nodes are free and no one waits"
            )
            if unshared is not None:
                return unshared
        budget_s = self._budget_s(job)
        alone, alone_cost = self._cheapest_own_nodes(profile, left, budget_s)
        shared, shared_cost = self._cheapest_shared(job, budget_s, alone_cost)
        best, best_cost = (alone, alone_cost) if shared is None else (shared, shared_cost)
        if self.registry.ledger.has_free(profile.rollout_nodes, profile.train_nodes):
            candidate = make_arriving_candidate(job, budget_s, self.registry.cap_s(job))
            for row in self._small_rows(max_members=1)[:_FOLLOWERS_TRIED]:
                layout = self._consolidation.lay_out_with_arrival(candidate, row, now_s, best_cost)
                if layout is not None:
                    best_cost = layout.cost
                    best = self._choose_new_group(profile, layout.pins[0], row)
        return best

    def _choose_new_group(self, profile: JobProfile, pins: int, row: int) -> GroupChoice:
        rollout_nodes = profile.rollout_nodes if pins else 0
        strategy = Strategy.ISOLATE if pins else Strategy.COLOCATE
        reason = f"new nodes, on which {self.registry.groups[row].group} can join it"
        return GroupChoice(None, 0, rollout_nodes, profile.train_nodes, strategy, reason)

    def _cheapest_shared(
        self, job: JobSpec, budget_s: float, cost_to_beat: float
    ) -> tuple[GroupChoice | None, float]:
        """The group that a job joins at the least added cost, if that is below `cost_to_beat`."""
        table, fleet = self.registry.table, self.fleet
        row, pins, new_nodes, cost = scan_cycles(
            *table.arrays,
            table.cycle_s,
            make_arriving_job(
                job.profile, fleet, job.iterations, budget_s, self.registry.cap_s(job)
            ),
            self.registry.scan_limits(self.max_group_size, cost_to_beat, _ARRIVAL_WORK),
        )
        if row < 0:
            return None, np.inf
        strategy = sharing_strategy(int(pins), int(new_nodes))
        group = self.registry.groups[row].group
        reason = f"shares the nodes of {group}: adds ${cost:,.2f} until that has ended"
        return GroupChoice(int(row), int(pins), int(new_nodes), 0, strategy, reason), float(cost)

    def _cheapest_own_nodes(
        self, profile: JobProfile, left: int, budget_s: float
    ) -> tuple[GroupChoice | None, float]:
        """The job's own nodes, as few as its budget allows at the least cost over its life; None
        and an infinite cost if they are not free.
        """
        best, best_cost = None, np.inf
        ledger, fleet = self.registry.ledger, self.fleet
        for nodes in range(1, profile.train_nodes + 1):
            train_s = fleet.train_s(profile, nodes)
            remote_s = profile.rollout_s + train_s + profile.sync_s
            local_s = fleet.local_rollout_s(profile, nodes) + train_s
            shapes = (
                (
                    profile.rollout_nodes,
                    remote_s,
                    fleet.explain_infeasible(profile),
                    Strategy.ISOLATE,
                ),
                (0, local_s, fleet.explain_infeasible_local(profile), Strategy.COLOCATE),
            )
            for rollout_nodes, iteration_s, never, strategy in shapes:
                cost = self.registry.worth_per_h(rollout_nodes, nodes) * left * iteration_s / 3600
                fits = left * iteration_s <= budget_s * (1 + 1e-9) and never is None
                if fits and ledger.has_free(rollout_nodes, nodes) and cost < best_cost:
                    reason = "has nodes of its own: no group is cheaper"
                    best = GroupChoice(None, 0, rollout_nodes, nodes, strategy, reason)
                    best_cost = cost
        return best, best_cost

    def remove(self, job: JobId) -> None:
        """Forget a job. The next rebalance looks for mergers of the jobs that stay."""
        row = self.registry.members[job].row
        self._changed.add(row)
        self._departed_from.add(row)
        self.registry.remove(job)

    def _replan_after_departure(self, row: int) -> Sequence[Placement]:
        """Replan a group that a member left, if a new plan saves more than the change may cost, or
        if the old one breaks a cap. No job changes nodes; one placement carries the new plan.
        """
        registry = self.registry
        group = registry.groups.get(row)
        if group is None or group.plan is None or len(group.jobs) == 1:
            return ()
        registry.table.cycle_s[row] = plan_period_s(registry, row)
        cycle = fit_group(registry, row)
        if cycle is None:
            return ()
        change_h = (cycle.period_s + float(registry.table.cycle_s[row])) / 2 / 3600
        gain = self._consolidation.group_cost(row) - self._consolidation.group_cost_in_cycle(
            row, cycle
        )
        least = change_h * registry.worth_per_h(len(group.rollout), len(group.train))
        if gain <= least and plan_keeps_caps(registry, row):
            return ()
        adopt_cycle(registry, row, group.jobs, cycle)
        return (registry.placement(group.jobs[0]),)

    def isolate(self, job: JobId, now_s: float) -> Sequence[Placement]:
        left = self.registry.members[job].row
        moves = super().isolate(job, now_s)
        if moves:
            self._changed.add(left)
            self._fit_plan(self.registry.members[job].row)
            # Executed at once, not with the other decisions of this instant: so another move is not
            # free, and the job must not move again for a while.
            self.registry.members[job].moved_s = math.nextafter(now_s, math.inf)
        return [self.registry.placement(move.job) for move in moves]

    def rebalance(self, now_s: float, profile: JobProfile | None = None) -> Sequence[Placement]:
        """Merge small groups, or change the layout of one, if that saves more than the restarts
        cost.

        A long search continues in the next call (`next_rebalance_s`), unless groups change first.
        """
        del profile
        moves = {
            move.job: move
            for row in self._departed_from
            for move in self._replan_after_departure(row)
        }
        self._departed_from.clear()
        if not self._may_move:
            self._changed |= self._search.changed if self._search is not None else set()
            self._search = None
            return list(moves.values())
        is_later = self._search is not None and not self._changed
        if not is_later:
            self._begin_search(_MERGERS_PER_SEARCH)
        self._consolidation.work_left = _SEARCH_WORK
        while (search := self._search) is not None and self._consolidation.work_left > 0:
            if search.pairs:
                incoming, target = search.pairs.popleft()
                gain_to_beat = 0.0 if search.best is None else search.best.gain
                merger = self._consolidation.find_merger(incoming, target, now_s, gain_to_beat)
                if merger is not None:
                    search.best, search.best_pair = merger, (incoming, target)
                continue
            self._search = None
            self._changed.clear()
            best = search.best
            if search.best_pair is not None and is_later:
                # Jobs of other part sizes may have rented nodes since, which changes their worth.
                self._consolidation.costs.clear()
                best = self._consolidation.find_merger(*search.best_pair, now_s)
            if best is not None:
                moves |= self._execute_merger(best, now_s)
                if search.mergers > 1:
                    self._begin_search(search.mergers - 1)
                    is_later = False
                self._changed.clear()
        return [self.registry.placement(job) for job in moves]

    def next_rebalance_s(self, profile: JobProfile, now_s: float) -> float | None:
        """Now if there is anything to look at, else when the next job may move again."""
        del profile
        if self._departed_from or (self._may_move and (self._changed or self._search)):
            return now_s
        rested_s = self._consolidation.resting.values() if self._may_move else ()
        return max(now_s, min(rested_s)) if rested_s else None

    @property
    def _may_move(self) -> bool:
        """Whether moves can save anything: on an owned fleet only while jobs are waiting."""
        return not self.fleet.owned or bool(self._waiting)

    def _execute_merger(self, merger: Merger, now_s: float) -> dict[JobId, Placement]:
        left = {self.registry.members[job].row for job in merger.jobs} - {merger.row}
        moves = {
            job: self.registry.placement(job)
            for job in execute_merger(self.registry, merger, now_s)
        }
        self._changed = left | {merger.row}
        for row in left:
            moves.update((move.job, move) for move in self._replan_after_departure(row))
        return moves

    def _begin_search(self, mergers: int) -> None:
        """Collect what to try: each small group by itself, and each way to move a small group, or
        one of its jobs, into another one, if one of the two has changed.
        """
        changed = self._changed | self._consolidation.resting.keys()
        if self._search is not None:
            changed |= self._search.changed
        self._changed = set(changed)
        self._consolidation.resting.clear()
        self._consolidation.costs.clear()
        pairs: deque[tuple[tuple[JobId, ...], int]] = deque()
        small = self._small_rows(max_members=3)
        incoming = [
            (row, jobs)
            for row in small
            for jobs in _movable_subsets(self.registry.groups[row].jobs)
        ]
        from_changed = [(row, jobs) for row, jobs in incoming if row in changed]
        for target in small:
            pairs.append(((), target))
            others = incoming if target in changed else from_changed
            pairs.extend([(jobs, target) for source, jobs in others if source != target])
        self._search = _MergerSearch(pairs, set(changed), mergers)
        self._changed = set()

    def _small_rows(self, max_members: int) -> list[int]:
        """Rows of the groups with few members: those that changed first, then those whose train
        nodes have the most idle time.
        """
        table = self.registry.table
        shares = train_shares(table.rows, table.members, table.work, table.pins, max_members)
        changed = np.fromiter(self._changed, np.int64, len(self._changed))
        shares[changed[changed < table.rows]] -= 1e6
        thinnest = np.argsort(shares, kind="stable")[:_SMALL_GROUPS_TRIED]
        rows: list[int] = thinnest[np.isfinite(shares[thinnest])].tolist()
        return rows


def _movable_subsets(jobs: Sequence[JobId]) -> list[tuple[JobId, ...]]:
    """The sets of a group's jobs that may move into another group: all of them, or a single one."""
    single = [(job,) for job in jobs] if len(jobs) > 1 else []
    return [tuple(jobs), *single]
