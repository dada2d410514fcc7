"""The cheapest grouping of a few known jobs under the rules of group placement, found exactly
(WEAVE 6.5, Opt).

Every division of the jobs into groups is covered, and in every group every sharing of rollout
nodes: each job once per meta-iteration, within memory, every bound and the largest group size. A
group costs what its nodes cost until its members are done, nodes being given back as soon as none
of those left uses them. For jobs that roll out on one node this is the optimum; jobs on several
rollout nodes share all or none of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from slackwater.model.errors import ConfigError
from slackwater.model.ids import JobId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Strategy
from slackwater.policy.columns import (
    BOUND_S,
    LEFT,
    MAX_MEMBERS,
    ROLL_S,
    SYNC_S,
    TRAIN_S,
    WORK_ROWS,
    Floats,
    Ints,
)
from slackwater.policy.ordering.round_robin_cycle import TOLERANCE_S, round_robin_period_s
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.grouped import GroupedPlacement
from slackwater.policy.placement.groups import GroupChoice, bits
from slackwater.policy.placement.layout import next_partition

MAX_JOBS = 12


@dataclass(frozen=True, slots=True)
class GroupDraft:
    """Jobs by their positions, the pins of each, and what the group costs until it is drained."""

    jobs: tuple[int, ...]
    pins: tuple[int, ...]
    train_nodes: int
    cost: float


def best_grouping(
    jobs: Sequence[JobSpec], fleet: FleetView, max_group_size: int = MAX_MEMBERS
) -> tuple[GroupDraft, ...]:
    """The division into groups that costs least until all jobs are done. Time grows as three to the
    number of jobs.
    """
    if len(jobs) > MAX_JOBS:
        raise ConfigError.of(
            "jobs", len(jobs), f"are too many for an exact search; give {MAX_JOBS}"
        )
    drafts: dict[int, GroupDraft] = {}
    for size in range(1, min(max_group_size, len(jobs)) + 1):
        for members in combinations(range(len(jobs)), size):
            draft = best_group(jobs, members, fleet)
            if draft is not None:
                drafts[sum(1 << member for member in members)] = draft
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for together in range(1, 1 << len(jobs)):
        first = together & -together
        found = (np.inf, 0)
        part = together
        while part:
            # The group of the first job, so that every division is met once.
            if part & first and part in drafts:
                found = min(found, (drafts[part].cost + best[together ^ part][0], part))
            part = (part - 1) & together
        best[together] = found
    groups = []
    together = (1 << len(jobs)) - 1
    while together:
        part = best[together][1]
        groups.append(drafts[part])
        together ^= part
    return tuple(groups)


def best_group(
    jobs: Sequence[JobSpec], members: tuple[int, ...], fleet: FleetView
) -> GroupDraft | None:
    """The cheapest valid group of exactly these jobs, or None if they cannot share."""
    best: GroupDraft | None = None
    for train_nodes in sorted({jobs[member].profile.train_nodes for member in members}):
        work = _work(jobs, members, train_nodes)
        train_gb = sum(jobs[member].profile.train_state_gb for member in members)
        if train_gb > fleet.train.node_type.host_memory_gb:
            continue
        block = np.zeros(len(members), np.int64)
        while next_partition(block, len(members)):
            if (block == 0).any():
                continue
            pins = _pins(jobs, members, block, fleet)
            if pins is None:
                continue
            period_s = round_robin_period_s(work, pins, len(members))
            if period_s > work[BOUND_S].min() + TOLERANCE_S:
                continue
            cost = drained_cost(work, pins, train_nodes, fleet)
            if best is None or cost < best.cost - 1e-9:
                best = GroupDraft(members, tuple(int(pin) for pin in pins), train_nodes, cost)
    return best


def _work(jobs: Sequence[JobSpec], members: tuple[int, ...], train_nodes: int) -> Floats:
    work = np.zeros((WORK_ROWS, len(members)))
    for index, member in enumerate(members):
        job = jobs[member]
        work[ROLL_S, index] = job.profile.rollout_s
        work[TRAIN_S, index] = job.profile.train_s_on(train_nodes)
        work[SYNC_S, index] = job.profile.sync_s
        work[BOUND_S, index] = job.slo * job.profile.solo_s
        work[LEFT, index] = job.iterations
    return work


def _pins(
    jobs: Sequence[JobSpec], members: tuple[int, ...], block: Ints, fleet: FleetView
) -> Ints | None:
    """Nodes for every block of jobs that share them, or None if one has too little memory."""
    pins = np.zeros(len(members), np.int64)
    taken = 0
    for number in range(1, int(block.max()) + 1):
        sharers = [index for index in range(len(members)) if block[index] == number]
        profiles = [jobs[members[index]].profile for index in sharers]
        if sum(p.rollout_state_gb for p in profiles) > fleet.rollout.node_type.host_memory_gb:
            return None
        for index, profile in zip(sharers, profiles, strict=True):
            pins[index] = ((1 << profile.rollout_nodes) - 1) << taken
        taken += max(profile.rollout_nodes for profile in profiles)
    return pins


def drained_cost(work: Floats, pins: Ints, train_nodes: int, fleet: FleetView) -> float:
    """What a round-robin group costs until its last member is done; the period shrinks as members
    leave.
    """
    work, pins = work.copy(), pins.copy()
    cost = 0.0
    while work.shape[1]:
        count = work.shape[1]
        period_s = round_robin_period_s(work, pins, count)
        rollout_nodes = len(bits(int(np.bitwise_or.reduce(pins))))
        turns = float(work[LEFT].min())
        cost += fleet.price_per_h(rollout_nodes, train_nodes) * turns * period_s / 3600
        work[LEFT] -= turns
        stay = work[LEFT] > 1e-9
        work, pins = work[:, stay].copy(), pins[stay].copy()
    return cost


class OptimalPlacement(GroupedPlacement):
    """Places jobs that are all known in advance where the optimum has them."""

    name = "optimum"

    def __init__(
        self, fleet: FleetView, jobs: Sequence[JobSpec], max_group_size: int = MAX_MEMBERS
    ) -> None:
        super().__init__(fleet, max_group_size)
        self._drafts = {}
        for draft in best_grouping(jobs, fleet, max_group_size):
            for index, member in enumerate(draft.jobs):
                self._drafts[jobs[member].job] = (draft, index)
        self._opened: dict[tuple[int, ...], tuple[JobId, dict[int, int]]] = {}

    def _choose(self, job: JobSpec, now_s: float) -> GroupChoice | None:
        del now_s
        draft, index = self._drafts[job.job]
        wanted = bits(draft.pins[index])
        opener, slots = self._opened.setdefault(draft.jobs, (job.job, {}))
        new = [bit for bit in wanted if bit not in slots]
        kept = sum(1 << slots[bit] for bit in wanted if bit in slots)
        for bit in new:
            slots[bit] = min(set(range(len(slots) + 1)) - set(slots.values()))
        if opener == job.job:
            return GroupChoice(
                None, 0, len(new), draft.train_nodes, Strategy.ISOLATE, "the optimum"
            )
        row = self.registry.members[opener].row
        strategy = Strategy.SCALE if new else Strategy.PACK
        return GroupChoice(row, kept, len(new), 0, strategy, "the optimum")
