"""Scanning all groups for the place of one job that adds the least cost until its group is
drained.
"""

import numpy as np

from slackwater.policy.columns import (
    BUDGET_S,
    CAP_S,
    LEFT,
    MAX_MEMBERS,
    ROLL_S,
    SYNC_S,
    TRAIN_S,
    Floats,
    Ints,
)
from slackwater.policy.compiled import compiled, copy_row
from slackwater.policy.placement.arrival import ArrivingJob, PlacementBudget
from slackwater.policy.placement.cycle_fitting import (
    MAX_ROUNDS,
    drain_cost,
    fit_cycle,
    longest_life_s,
)
from slackwater.policy.placement.group_scan import (
    count_bits,
    free_slots,
    memory_allows,
    next_choice,
    spread_bits,
)

# Groups that one arrival looks into, those first whose nodes it would keep the shortest.
_MOST_TRIED = 256


@compiled
def train_share(work: Floats, pins: Ints, members: int) -> float:
    """Part of the train nodes' time that the members need at least, each just within its budget."""
    share = 0.0
    for j in range(members):
        busy = work[TRAIN_S, j] + (work[ROLL_S, j] if pins[j] == 0 else 0.0)
        share += busy * work[LEFT, j] / max(work[BUDGET_S, j], 1e-9)
    return share


@compiled
def train_shares(rows: int, members: Ints, work: Floats, pins: Ints, most: int) -> Floats:
    """`train_share` of every group with at most so many members; infinite for the others."""
    shares = np.full(rows, np.inf)
    for row in range(rows):
        if 0 < members[row] <= most:
            shares[row] = train_share(work[row], pins[row], members[row])
    return shares


@compiled
def _pinned_cost(
    trial: Floats,
    pins: Ints,
    members: int,
    node_mask: int,
    node_gb: Floats,
    train_nodes: int,
    wanted: int,
    new: int,
    job: ArrivingJob,
    room: PlacementBudget,
    starts: Floats,
) -> tuple[int, float]:
    """Cheapest pinning of the last member on `wanted - new` nodes of the group and `new` added
    ones: kept nodes or -1, cost.
    """
    best_kept, best_cost = -1, np.inf
    existing = wanted - new
    present = count_bits(node_mask)
    no_delay = np.zeros(members)
    choice = (1 << existing) - 1
    while not choice >> present:
        kept = spread_bits(choice, node_mask)
        if memory_allows(kept, node_gb, job.rollout_gb, room.rollout_node_gb):
            pins[members - 1] = kept | free_slots(node_mask, new)
            cycle = fit_cycle(trial, pins, members, starts)
            if cycle > 0.0:
                cost = drain_cost(
                    trial,
                    pins,
                    members,
                    cycle,
                    no_delay,
                    train_nodes,
                    room.rollout_price,
                    room.train_price,
                )
                if cost < best_cost:
                    best_kept, best_cost = kept, cost
        if existing == 0:
            break
        choice = next_choice(choice)
    return best_kept, best_cost


@compiled
def _local_cost(
    trial: Floats,
    pins: Ints,
    members: int,
    train_nodes: int,
    job: ArrivingJob,
    room: PlacementBudget,
    starts: Floats,
) -> float:
    """Cost with the last member's rollouts on the train nodes; infinite if that does not fit."""
    last = members - 1
    pins[last] = 0
    trial[ROLL_S, last], trial[SYNC_S, last] = job.local_rollout_s / train_nodes, 0.0
    cost = np.inf
    cycle = fit_cycle(trial, pins, members, starts)
    if cycle > 0.0:
        cost = drain_cost(
            trial,
            pins,
            members,
            cycle,
            np.zeros(members),
            train_nodes,
            room.rollout_price,
            room.train_price,
        )
    trial[ROLL_S, last], trial[SYNC_S, last] = job.rollout_s, job.sync_s
    return cost


@compiled
def _best_in_group(
    trial: Floats,
    pins: Ints,
    members: int,
    node_mask: int,
    node_gb: Floats,
    train_gb: float,
    train_nodes: int,
    stay_cost: float,
    before_cost: float,
    to_beat: float,
    job: ArrivingJob,
    room: PlacementBudget,
    starts: Floats,
) -> tuple[int, int, float]:
    """Kept pins or -1, new nodes, and added cost of the best way into one group."""
    best_kept, best_new, best_cost = -1, 0, to_beat
    wanted = job.rollout_nodes
    present = count_bits(node_mask)
    if (
        stay_cost < best_cost
        and train_gb + job.rollout_gb + job.train_gb <= room.train_node_gb + 1e-9
    ):
        cost = _local_cost(trial, pins, members, train_nodes, job, room, starts) - before_cost
        if cost < best_cost:
            best_kept, best_new, best_cost = 0, 0, cost
    for new in range(max(wanted - present, 0), min(wanted, room.free_rollout_nodes) + 1):
        least = stay_cost + new * room.rollout_price * job.life_h
        if least >= best_cost or present + new > room.most_rollout_nodes:
            break
        kept, cost = _pinned_cost(
            trial, pins, members, node_mask, node_gb, train_nodes, wanted, new, job, room, starts
        )
        if kept >= 0 and cost - before_cost < best_cost - 1e-9:
            best_kept, best_new, best_cost = kept, new, cost - before_cost
    return best_kept, best_new, best_cost


@compiled
def _stay_costs(
    rows: int,
    members: Ints,
    train_nodes: Ints,
    train_gb: Floats,
    work: Floats,
    pins: Ints,
    cycle_s: Floats,
    job: ArrivingJob,
    room: PlacementBudget,
) -> Floats:
    """What a group's train nodes cost at least from its own end to the job's; infinite where the
    job cannot go.
    """
    costs = np.full(rows, np.inf)
    for row in range(rows):
        count, nodes = members[row], train_nodes[row]
        if (
            count == 0
            or count >= room.most_members
            or train_gb[row] + job.train_gb > room.train_node_gb + 1e-9
        ):
            continue
        more = job.train_s / nodes * job.left / job.budget_s
        if train_share(work[row], pins[row], count) + more > 1.0 + 1e-9:
            continue
        beyond_h = job.life_h - longest_life_s(work[row], count, cycle_s[row]) / 3600.0
        costs[row] = max(beyond_h, 0.0) * nodes * room.train_price
    return costs


@compiled
def scan_cycles(
    rows: int,
    members: Ints,
    train_nodes: Ints,
    node_mask: Ints,
    train_gb: Floats,
    node_gb: Floats,
    work: Floats,
    pins: Ints,
    cycle_s: Floats,
    job: ArrivingJob,
    room: PlacementBudget,
) -> tuple[int, int, int, float]:
    """Row, kept pins, new rollout nodes and added cost of the cheapest place; row -1 if none costs
    less than `room.to_beat`.
    """
    best_row, best_pins, best_new, best_cost = -1, 0, 0, room.to_beat
    trial = np.zeros((work.shape[1], MAX_MEMBERS + 1))
    pinned = np.zeros(MAX_MEMBERS + 1, np.int64)
    starts = np.zeros((MAX_MEMBERS + 1, 2, MAX_ROUNDS))
    no_delay = np.zeros(MAX_MEMBERS + 1)
    stay = _stay_costs(rows, members, train_nodes, train_gb, work, pins, cycle_s, job, room)
    for row in np.argsort(stay, kind="mergesort")[:_MOST_TRIED]:
        if stay[row] >= best_cost:
            break
        count, nodes = members[row], train_nodes[row]
        for column in range(len(trial)):
            copy_row(trial[column], work[row, column], count)
        copy_row(pinned, pins[row], count)
        trial[ROLL_S, count], trial[TRAIN_S, count] = job.rollout_s, job.train_s / nodes
        trial[SYNC_S, count], trial[BUDGET_S, count] = job.sync_s, job.budget_s
        trial[LEFT, count], trial[CAP_S, count] = job.left, job.cap_s
        before = drain_cost(
            trial,
            pinned,
            count,
            cycle_s[row],
            no_delay,
            nodes,
            room.rollout_price,
            room.train_price,
        )
        kept, new, cost = _best_in_group(
            trial, pinned, count + 1, node_mask[row], node_gb[row], train_gb[row], nodes,
            stay[row], before, best_cost, job, room, starts,
        )  # fmt: skip
        if kept >= 0:
            best_row, best_pins, best_new, best_cost = row, kept, new, cost
    return best_row, best_pins, best_new, best_cost
