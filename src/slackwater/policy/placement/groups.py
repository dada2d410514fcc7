"""Co-execution groups: jobs that share rollout and train nodes, each pinned to its own
(WEAVE 4.1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

import numpy as np

from slackwater.model.ids import GroupId, JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import Role
from slackwater.model.placement import GroupPlan, Placement, Strategy
from slackwater.policy.columns import (
    BOUND_S,
    BUDGET_S,
    CAP_S,
    LEFT,
    MAX_MEMBERS,
    MAX_ROLLOUT_NODES,
    ROLL_S,
    ROUNDS,
    SYNC_S,
    TRAIN_S,
    WORK_ROWS,
    Floats,
)
from slackwater.policy.placement.arrival import ScanLimits
from slackwater.policy.placement.cycle_fitting import min_cycle_s
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.group_table import GroupTable
from slackwater.policy.placement.interface import JobProgress
from slackwater.policy.placement.iteration_caps import iteration_cap_s
from slackwater.policy.placement.rented_nodes import RentedNodes

# A new plan can cost a job one cycle and the phase before it. Time that a job has saved may pay for
# that.
_LOST_CYCLES = 2


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """The place of a job: `row` is its group, or None for a new group with `train_nodes` nodes.

    `pins` are the group's existing rollout nodes that it uses; `new_rollout_nodes` are rented for
    it. With neither, the job rolls out on the train nodes.
    """

    row: int | None
    pins: int
    new_rollout_nodes: int
    train_nodes: int
    strategy: Strategy
    reason: str


@dataclass(slots=True)
class Member:
    """A placed job: the `index`-th member of the group at `row`. It must make its `left` iterations
    within `budget_s`.
    """

    spec: JobSpec
    row: int
    index: int
    pins: int
    left: int
    budget_s: float
    strategy: Strategy
    reason: str
    moved_s: float = -math.inf  # when it was last placed or moved
    may_move: bool = True
    overhead_s: float = 0.0  # of each iteration, besides its phases: two switches and the sync
    share: float | None = None  # recent iteration time over the worst case
    cap_s: float = math.inf  # cached for `cap_share`
    cap_share: float = -1.0


@dataclass(slots=True)
class Group:
    """The names of a group's nodes and jobs. Its numbers are in a row of the table."""

    group: GroupId
    train: tuple[NodeId, ...]
    rollout: dict[int, NodeId]
    jobs: list[JobId]
    plan: GroupPlan | None = None


def bits(mask: int) -> list[int]:
    """Positions of the set bits."""
    return [position for position in range(mask.bit_length()) if mask >> position & 1]


class GroupRegistry:
    """All groups and members of a policy. It keeps the table and the rented nodes consistent with
    them.
    """

    def __init__(self, fleet: FleetView) -> None:
        self.fleet = fleet
        self.table = GroupTable()
        self.ledger = RentedNodes(fleet)
        self.groups: dict[int, Group] = {}
        self.members: dict[JobId, Member] = {}
        self.name = "group"  # prefix of group names
        # Cached: every search for mergers asks for the same few lengths again and again.
        self.lengths_on_train_nodes_s = lru_cache(4096)(self._lengths_on_train_nodes_s)
        self._mean_share = 0.0  # mean of the members' `share`, once some are known
        self._opened = 0

    def _lengths_on_train_nodes_s(self, profile: JobProfile, nodes: int) -> tuple[float, float]:
        """Lengths of a rollout phase and of a train phase on so many train nodes."""
        fleet = self.fleet
        return fleet.local_rollout_s(profile, nodes), fleet.train_s(profile, nodes)

    def scan_limits(
        self, max_members: int, cost_to_beat: float, max_work: int = 1 << 40
    ) -> ScanLimits:
        """The limits of a scan: free nodes, memory, prices."""
        rollout, train = self.fleet.rollout.node_type, self.fleet.train.node_type
        return ScanLimits(
            max_members=max_members,
            free_rollout_nodes=self.ledger.free(Role.ROLLOUT),
            rollout_node_gb=float(rollout.host_memory_gb),
            train_node_gb=float(train.host_memory_gb),
            max_rollout_nodes=MAX_ROLLOUT_NODES,
            rollout_price=float(self.ledger.worth_per_h(Role.ROLLOUT)),
            train_price=float(self.ledger.worth_per_h(Role.TRAIN)),
            cost_to_beat=float(cost_to_beat),
            max_work=max_work,
        )

    def admit(self, spec: JobSpec, choice: GroupChoice, budget_s: float) -> Member:
        """Place a job where a policy chose, and rent the missing nodes."""
        member = Member(spec, -1, -1, 0, spec.iterations, budget_s, choice.strategy, choice.reason)
        self._enter(member, choice)
        return member

    def cap_s(self, spec: JobSpec, share: float | None = None) -> float:
        """The longest iteration that a plan may give a job. `share` is its recent iteration time
        over the worst case; until it is known, the mean of all jobs is assumed.
        """
        return iteration_cap_s(spec, self._mean_share if share is None else share)

    def move(self, job: JobId, choice: GroupChoice) -> Member:
        """Move a job. Its progress and budget do not change."""
        member = self.members[job]
        self._leave(member, keep_group=choice.row == member.row)
        return self.put_back(job, choice)

    def take_out(self, job: JobId) -> None:
        """Free a job's nodes until `put_back`, so that jobs can swap nodes on a full fleet."""
        self._leave(self.members[job])

    def put_back(self, job: JobId, choice: GroupChoice) -> Member:
        """Place a job that was taken out where a policy chose."""
        member = self.members[job]
        member.strategy, member.reason = choice.strategy, choice.reason
        self._enter(member, choice)
        return member

    def remove(self, job: JobId) -> None:
        self._leave(self.members.pop(job))

    def _enter(self, member: Member, choice: GroupChoice) -> None:
        profile = member.spec.profile
        row = choice.row
        if row is None:
            row = self.table.take_row(choice.train_nodes)
            train = tuple(self.ledger.rent(Role.TRAIN, choice.train_nodes))
            self.groups[row] = Group(GroupId(f"{self.name}-{self._opened}"), train, {}, [])
            self._opened += 1
        group = self.groups[row]
        pins = choice.pins
        for node in self.ledger.rent(Role.ROLLOUT, choice.new_rollout_nodes):
            slot = next(s for s in range(MAX_ROLLOUT_NODES) if s not in group.rollout)
            group.rollout[slot] = node
            pins |= 1 << slot
        self.table.node_mask[row] |= pins
        self._add_memory(row, pins, profile.train_state_gb, profile.rollout_state_gb)
        member.row, member.pins, member.index = row, pins, len(group.jobs)
        member.overhead_s = self._overhead_s(profile)
        self.members[member.spec.job] = member
        group.jobs.append(member.spec.job)
        self.table.append(row, self._work(member), pins)

    def _add_memory(self, row: int, pins: int, train_gb: float, rollout_gb: float) -> None:
        """Add state to a group's nodes: rollout state to the pinned nodes, else to train nodes."""
        self.table.train_gb[row] += train_gb
        if not pins:
            self.table.train_gb[row] += rollout_gb
        for slot in bits(pins):
            self.table.node_gb[row, slot] += rollout_gb

    def _overhead_s(self, profile: JobProfile) -> float:
        return profile.sync_s + 2 * self.fleet.switch_s(profile)

    def _work(self, member: Member) -> Floats:
        profile = member.spec.profile
        nodes, local = int(self.table.train_nodes[member.row]), not member.pins
        work = np.zeros(WORK_ROWS)
        work[ROLL_S] = self.fleet.local_rollout_s(profile, nodes) if local else profile.rollout_s
        work[TRAIN_S] = self.fleet.train_s(profile, nodes)
        work[SYNC_S] = 0.0 if local else profile.sync_s
        work[BOUND_S] = member.spec.slo * profile.solo_s
        work[BUDGET_S], work[LEFT], work[ROUNDS] = member.budget_s, member.left, 1
        work[CAP_S] = self.cap_s(member.spec, member.share)
        return work

    def _leave(self, member: Member, *, keep_group: bool = False) -> None:
        row, profile = member.row, member.spec.profile
        group = self.groups[row]
        self._forget_slots(group, member.spec.job)
        self.table.drop(row, member.index)
        del group.jobs[member.index]
        for job in group.jobs[member.index :]:
            self.members[job].index -= 1
        self._add_memory(row, member.pins, -profile.train_state_gb, -profile.rollout_state_gb)
        used = 0
        for job in group.jobs:
            used |= self.members[job].pins
        for slot in [slot for slot in group.rollout if not used >> slot & 1]:
            self.ledger.give_back(group.rollout.pop(slot))
            self.table.node_gb[row, slot] = 0.0
        self.table.node_mask[row] = used
        shortest_s = min_cycle_s(self.table.work[row], self.table.pins[row], len(group.jobs))
        self.table.cycle_s[row] = min(self.table.cycle_s[row], shortest_s)
        if not group.jobs and not keep_group:
            for node in group.train:
                self.ledger.give_back(node)
            del self.groups[row]
            self.table.clear_row(row)

    @staticmethod
    def _forget_slots(group: Group, job: JobId) -> None:
        """Remove a job from its group's plan. The rest still keeps every bound."""
        if group.plan is not None:
            slots = tuple(slot for slot in group.plan.slots if slot.job != job)
            group.plan = GroupPlan(group.plan.period_s, slots)

    def observe(self, progress: Sequence[JobProgress]) -> None:
        """Record the progress of jobs; those that are not placed are ignored."""
        members = self.members
        placed = [(members[report.job], report) for report in progress if report.job in members]
        usual = self._mean_share = self._update_shares(placed)
        rows, indices = [], []
        budgets_s, lefts, caps_s = [], [], []
        for member, report in placed:
            share = usual if member.share is None else member.share
            if share != member.cap_share:
                member.cap_s, member.cap_share = iteration_cap_s(member.spec, share), share
            left, budget_s = report.iterations_left, report.budget_s
            most_s = (left + _LOST_CYCLES) * member.cap_s
            if most_s < budget_s:
                budget_s = most_s
            member.left, member.budget_s, member.may_move = left, budget_s, report.may_move
            rows.append(member.row)
            indices.append(member.index)
            budgets_s.append(budget_s)
            lefts.append(left)
            caps_s.append(member.cap_s)
        at = np.array(rows, np.int64), np.array(indices, np.int64)
        for column, values in ((BUDGET_S, budgets_s), (LEFT, lefts), (CAP_S, caps_s)):
            self.table.work[at[0], column, at[1]] = values

    def _update_shares(self, placed: Sequence[tuple[Member, JobProgress]]) -> float:
        """Update each member's `share`; return the mean over all with a known share."""
        shares = []
        for member, report in placed:
            if report.rollout_s is not None and report.train_s is not None:
                lately_s = report.rollout_s + report.train_s + member.overhead_s
                member.share = min(lately_s / member.spec.profile.solo_s, 1.0)
                shares.append(member.share)
        return fmean(shares) if shares else self._mean_share

    def cap_budgets(self, budget_s: float) -> None:
        """Limit the budgets of all jobs to `budget_s`."""
        for member in self.members.values():
            member.budget_s = min(member.budget_s, budget_s)
            self.table.work[member.row, BUDGET_S, member.index] = member.budget_s

    def revise(self, job: JobId, profile: JobProfile) -> None:
        """Take over a changed profile. The job's nodes and budget do not change."""
        member = self.members[job]
        row, old = member.row, member.spec.profile
        train_gb = profile.train_state_gb - old.train_state_gb
        rollout_gb = profile.rollout_state_gb - old.rollout_state_gb
        self._add_memory(row, member.pins, train_gb, rollout_gb)
        member.spec, member.cap_share = replace(member.spec, profile=profile), -1.0
        member.overhead_s = self._overhead_s(profile)
        rounds = self.table.work[row, ROUNDS, member.index]
        self.table.work[row, :, member.index] = self._work(member)
        self.table.work[row, ROUNDS, member.index] = rounds

    def placement(self, job: JobId) -> Placement:
        member = self.members[job]
        group = self.groups[member.row]
        return Placement(
            job,
            group.group,
            self.rollout_nodes(job),
            group.train,
            member.strategy,
            member.reason,
            group.plan,
        )

    def rollout_nodes(self, job: JobId) -> tuple[NodeId, ...]:
        """The nodes on which a job rolls out: its pinned ones, or the group's train nodes."""
        member = self.members[job]
        group = self.groups[member.row]
        return tuple(group.rollout[slot] for slot in bits(member.pins)) or group.train

    def worth_per_h(self, rollout_nodes: int, train_nodes: int) -> float:
        """The value of so many nodes, for comparing places (`RentedNodes.worth_per_h`)."""
        return rollout_nodes * self.ledger.worth_per_h(
            Role.ROLLOUT
        ) + train_nodes * self.ledger.worth_per_h(Role.TRAIN)

    def check_integrity(self) -> None:
        """Assert that every member is in one group, states fit into memory, exactly the nodes of
        the groups are rented, and pools keep their limits.
        """
        held: list[NodeId] = []
        for row, group in self.groups.items():
            assert group.jobs and len(group.jobs) <= MAX_MEMBERS, f"{group.group} is empty"
            assert self.table.members[row] == len(group.jobs)
            assert [self.members[job].index for job in group.jobs] == list(range(len(group.jobs)))
            held += [*group.train, *group.rollout.values()]
            self._check_memory(row, group)
        assert len(held) == len(set(held)), "a node is in two groups"
        assert set(held) == set(self.ledger.list_rented()), "rented nodes and held nodes differ"
        grouped = [job for group in self.groups.values() for job in group.jobs]
        assert sorted(grouped) == sorted(self.members), "a job is in no group or in two"
        for role in (Role.ROLLOUT, Role.TRAIN):
            assert self.ledger.free(role) >= 0, f"more {role} nodes than the pool has"

    def _check_memory(self, row: int, group: Group) -> None:
        node_gb = dict.fromkeys(group.rollout, 0.0)
        train_gb = 0.0
        pinned = {slot for job in group.jobs for slot in bits(self.members[job].pins)}
        assert pinned == set(group.rollout), f"{group.group} pays for rollout nodes that none uses"
        for job in group.jobs:
            member = self.members[job]
            assert member.row == row
            profile = member.spec.profile
            train_gb += profile.train_state_gb + (0 if member.pins else profile.rollout_state_gb)
            for slot in bits(member.pins):
                node_gb[slot] += profile.rollout_state_gb
        assert train_gb <= self.fleet.train.node_type.host_memory_gb + 1e-6, "train node memory"
        assert abs(train_gb - self.table.train_gb[row]) < 1e-3
        for slot, used_gb in node_gb.items():
            assert used_gb <= self.fleet.rollout.node_type.host_memory_gb + 1e-6, "rollout memory"
            assert abs(used_gb - self.table.node_gb[row, slot]) < 1e-3


def choose_isolated(
    registry: GroupRegistry, profile: JobProfile, reason: str
) -> GroupChoice | None:
    """Choose a new group with the nodes that the job declares; None while they are not free."""
    if not registry.ledger.has_free(profile.rollout_nodes, profile.train_nodes):
        return None
    return GroupChoice(
        None, 0, profile.rollout_nodes, profile.train_nodes, Strategy.ISOLATE, reason
    )


def choose_colocated(registry: GroupRegistry, nodes: int, reason: str) -> GroupChoice | None:
    """Choose a new group in which all phases run on `nodes` train nodes; None while they are not
    free.
    """
    if not registry.ledger.has_free(0, nodes):
        return None
    return GroupChoice(None, 0, 0, nodes, Strategy.COLOCATE, reason)
