"""Dynamic regrouping: group placement that searches for a better grouping of all jobs every hour
(WEAVE 6.6, the drift baseline).

The paper searches by brute force, which is not feasible for the twenty jobs of a running fleet.
Here the best of many orders of admission is taken, and the search time is not charged. A new
grouping is adopted if it saves more than its restarts cost.

A grouping bounds iterations only, so a restart breaks a job's SLO unless its earlier iterations
saved enough time. With `keep_slos` a grouping is adopted only if all jobs that move have saved
enough.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import Role
from slackwater.model.placement import Placement, Refusal, Strategy
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.group_packing import GroupPlacement
from slackwater.policy.placement.groups import GroupChoice, bits
from slackwater.policy.placement.interface import JobProgress

# How long a cheaper grouping is expected to last.
_EXPECTED_LIFE_H = 4.0
_ROLES = (Role.ROLLOUT, Role.TRAIN)


class Regrouping(GroupPlacement):
    """Regroups all jobs every `every_s`, by the best of `orders` random orders of admission."""

    name = "regrouping"

    def __init__(
        self,
        fleet: FleetView,
        max_group_size: int,
        every_s: float,
        orders: int,
        seed: int,
        *,
        keep_slos: bool = False,
    ) -> None:
        super().__init__(fleet, max_group_size)
        self._every_s = every_s
        self._orders = orders
        self._generator = np.random.default_rng([seed, 3])
        self._next_s = every_s
        self._keep_slos = keep_slos
        self._budgets_s: dict[JobId, float] = {}

    def observe(self, progress: Sequence[JobProgress], waiting: Sequence[JobSpec] = ()) -> None:
        """Record the progress of jobs and the budgets that their SLOs leave."""
        super().observe(progress, waiting)
        self._budgets_s = {report.job: report.budget_s for report in progress}

    def rebalance(self, now_s: float, profile: JobProfile | None = None) -> Sequence[Placement]:
        """The moves to the best grouping found, if it is time to search and the grouping pays."""
        del profile
        if now_s < self._next_s:
            return ()
        self._next_s = now_s + self._every_s
        specs = [member.spec for member in self.registry.members.values()]
        found = [self._regroup(order) for order in self._candidate_orders(specs)]
        cheaper = sorted(
            (one for one in found if one and one.hourly_cost() < self.hourly_cost() - 1e-9),
            key=lambda one: round(one.hourly_cost(), 6),
        )
        for target in cheaper:
            hosts = self._assign_hosts(target)
            moving = self._list_moving(hosts)
            if not self._keep_slos or all(self._can_pay(job) for job in moving):
                return self._adopt(target, hosts, moving)
        return ()

    def _can_pay(self, job: JobId) -> bool:
        """Whether a job keeps its SLO after a restart even if all iterations take their bound."""
        member = self.registry.members[job]
        bound_s = member.left * member.spec.slo * member.spec.profile.solo_s
        return self._budgets_s.get(job, bound_s) - self._restart_s(member.spec.profile) >= bound_s

    def _candidate_orders(self, specs: list[JobSpec]) -> list[list[JobSpec]]:
        keys: tuple[Callable[[JobSpec], tuple[float, ...]], ...] = (
            lambda s: (s.arrival_s,),
            lambda s: (-s.profile.solo_s,),
            lambda s: (-s.profile.train_s,),
            lambda s: (-s.profile.rollout_s,),
            lambda s: (s.slo,),
            lambda s: (-s.profile.train_nodes, -s.profile.solo_s),
        )
        orders = [sorted(specs, key=key) for key in keys]
        for _ in range(self._orders):
            order = self._generator.permutation(len(specs))
            orders.append([specs[int(index)] for index in order])
        return orders

    def _regroup(self, order: list[JobSpec]) -> GroupPlacement | None:
        scratch = GroupPlacement(self.fleet, self.max_group_size)
        for spec in order:
            if isinstance(scratch.place(spec, 0.0), Refusal):
                return None
        mine, found = self.registry.ledger, scratch.registry.ledger
        fits = all(found.count(role) <= mine.count(role) + mine.free(role) for role in _ROLES)
        return scratch if fits else None

    def _list_moving(self, hosts: dict[int, "_Host"]) -> list[JobId]:
        staying = {job for host in hosts.values() for job in host.stay}
        return [job for job in self.registry.members if job not in staying]

    def _adopt(
        self, target: GroupPlacement, hosts: dict[int, "_Host"], moving: list[JobId]
    ) -> Sequence[Placement]:
        lost = sum(self._restart_cost(job) for job in moving)
        if (self.hourly_cost() - target.hourly_cost()) * _EXPECTED_LIFE_H <= lost:
            return ()
        for job in moving:  # take out all before placing any: the fleet may have no spare nodes
            self.registry.take_out(job)
        for row, group in target.registry.groups.items():
            for job in group.jobs:
                if job not in hosts[row].stay:
                    self._enter(job, target, row, hosts[row])
        return [self.registry.placement(job) for job in moving]

    def _restart_cost(self, job: JobId) -> float:
        profile = self.registry.members[job].spec.profile
        price = self.fleet.price_per_h(profile.rollout_nodes, profile.train_nodes)
        return price * self._restart_s(profile) / 3600

    def _restart_s(self, profile: JobProfile) -> float:
        """The time of a restart, with the iteration that is repeated."""
        return self.fleet.move.restart_s(profile) + profile.solo_s

    def _assign_hosts(self, target: GroupPlacement) -> dict[int, "_Host"]:
        """For every target group the existing group that it is made from. Groups in which most jobs
        stay are assigned first, each at most once.
        """
        found = [
            (row, self._try_host(target, row, host))
            for row, group in target.registry.groups.items()
            for host in sorted({self.registry.members[job].row for job in group.jobs})
        ]
        found.sort(key=lambda pair: -len(pair[1].stay))
        hosts: dict[int, _Host] = {}
        taken: set[int | None] = set()
        for row, host in found:
            if row not in hosts and host.row not in taken and host.stay:
                hosts[row] = host
                taken.add(host.row)
        return {row: hosts.get(row, _Host(None, {}, set())) for row in target.registry.groups}

    def _try_host(self, target: GroupPlacement, row: int, host: int) -> "_Host":
        """Find which jobs could stay in group `host` if it became the target group."""
        made = _Host(host, {}, set())
        if self.registry.table.train_nodes[host] != target.registry.table.train_nodes[row]:
            return made
        for job in target.registry.groups[row].jobs:
            member = self.registry.members[job]
            wanted, had = bits(target.registry.members[job].pins), bits(member.pins)
            if member.row != host or len(wanted) != len(had):
                continue
            pairs = dict(zip(wanted, had, strict=True))
            if _agrees(made.slots, pairs):
                made.slots |= pairs
                made.stay.add(job)
        return made

    def _enter(self, job: JobId, target: GroupPlacement, row: int, host: "_Host") -> None:
        """Move one job to its place in the target."""
        wanted = bits(target.registry.members[job].pins)
        known = sum(1 << host.slots[slot] for slot in wanted if slot in host.slots)
        fresh = [slot for slot in wanted if slot not in host.slots]
        train_nodes = int(target.registry.table.train_nodes[row]) if host.row is None else 0
        strategy = Strategy.ISOLATE if host.row is None else Strategy.PACK
        choice = GroupChoice(
            host.row, known, len(fresh), train_nodes, strategy, "a cheaper grouping"
        )
        member = self.registry.put_back(job, choice)
        host.slots |= dict(zip(fresh, bits(member.pins & ~known), strict=True))
        host.row = member.row


@dataclass(slots=True)
class _Host:
    """The existing group that a target group is made from: its row (None for a new group), its
    slots by target slot, and the jobs that stay on their nodes.
    """

    row: int | None
    slots: dict[int, int]
    stay: set[JobId]


def _agrees(slots: dict[int, int], pairs: dict[int, int]) -> bool:
    """Whether the mapping stays one to one with more pairs."""
    merged = slots | pairs
    return all(slots.get(key, value) == value for key, value in pairs.items()) and len(
        set(merged.values())
    ) == len(merged)
