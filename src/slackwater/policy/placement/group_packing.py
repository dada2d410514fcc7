"""Group placement: pack each arriving job into the dependency bubbles of an existing group (WEAVE
4.2, Algorithm 1).

Saturated groups are skipped: those whose busiest node is busy as long as the longest member's
iteration. In the others the job shares rollout nodes that are rented already, or as few new ones as
possible are added; otherwise it gets its own group. A place is valid if each node's host memory
holds the states of all jobs pinned to it, and one meta-iteration at worst-case lengths keeps every
member's bound. The place with the least marginal cost wins; among equals the one with the largest
slack, then the oldest group.
"""

import numpy as np

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Placement, Strategy
from slackwater.policy.columns import MAX_MEMBERS
from slackwater.policy.ordering.round_robin_cycle import load_s, longest_solo_s
from slackwater.policy.placement.arrival import make_arriving_job
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.group_scan import scan_groups
from slackwater.policy.placement.grouped import GroupedPlacement
from slackwater.policy.placement.groups import GroupChoice, choose_colocated, choose_isolated


class GroupPlacement(GroupedPlacement):
    """WEAVE's inter-group scheduler. With `colocate` a job that fits no group may run all phases on
    train nodes, if that keeps its bound and costs less.
    """

    name = "group"

    def __init__(
        self, fleet: FleetView, max_group_size: int = MAX_MEMBERS, *, colocate: bool = False
    ) -> None:
        super().__init__(fleet, max_group_size)
        self._colocate = colocate

    def _choose_own_nodes(self, job: JobSpec) -> GroupChoice | None:
        profile, fleet = job.profile, self.fleet
        apart = choose_isolated(self.registry, profile, "no group has a bubble that it fits")
        local_s = fleet.local_rollout_s(profile, profile.train_nodes) + profile.train_s
        local_cost = fleet.price_per_h(0, profile.train_nodes) * local_s
        apart_cost = fleet.price_per_h(profile.rollout_nodes, profile.train_nodes) * profile.solo_s
        if (
            not self._colocate
            or local_s > job.slo * profile.solo_s
            or local_cost >= apart_cost
            or fleet.explain_infeasible_local(profile) is not None
        ):
            return apart
        reason = "no group has a bubble that it fits, and train nodes alone cost less"
        return choose_colocated(self.registry, profile.train_nodes, reason) or apart

    def _choose(self, job: JobSpec, now_s: float) -> GroupChoice | None:
        del now_s
        profile, table, fleet = job.profile, self.registry.table, self.fleet
        row, pins, new_nodes, slack = scan_groups(
            *table.arrays,
            make_arriving_job(
                profile, fleet, job.iterations, job.slo * profile.solo_s * job.iterations
            ),
            self.registry.scan_limits(self.max_group_size, np.inf),
        )
        alone = self._choose_own_nodes(job)
        if row < 0:
            return alone
        price = fleet.price_per_h(new_nodes, 0)
        if alone is not None and price >= fleet.price_per_h(
            profile.rollout_nodes, profile.train_nodes
        ):
            return alone
        group = self.registry.groups[row].group
        if new_nodes:
            reason = (
                f"shares the train nodes of {group}, {new_nodes} rollout nodes added, slack "
                f"{slack:.0%}"
            )
            return GroupChoice(int(row), int(pins), int(new_nodes), 0, Strategy.SCALE, reason)
        reason = f"fits the bubbles of {group}, slack {slack:.0%}"
        return GroupChoice(int(row), int(pins), 0, 0, Strategy.PACK, reason)

    def revise(self, job: JobId, profile: JobProfile, now_s: float) -> tuple[Placement, ...]:
        """Take over drifted phase lengths. If the group is saturated now, the job is placed again
        (WEAVE 5, drift).
        """
        self.registry.revise(job, profile)
        member = self.registry.members[job]
        row = member.row
        table = self.registry.table
        count = int(table.members[row])
        load = load_s(table.work[row], table.pins[row], count)
        if count < 2 or load < longest_solo_s(table.work[row], count):
            return ()
        choice = self._choose(member.spec, now_s)
        if choice is None or choice.row == row:
            return ()
        self.registry.move(job, choice)
        return (self.registry.placement(job),)
