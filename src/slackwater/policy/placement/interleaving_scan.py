"""Scan all groups for the place of one arriving job that adds the least rent until the group's last
job ends.
"""

import numpy as np

from slackwater.policy.columns import (
    BUDGET_S,
    CAP_S,
    LEFT,
    MAX_MEMBERS,
    MAX_ROLLOUT_NODES,
    ROLL_S,
    SYNC_S,
    TRAIN_S,
    Floats,
    Ints,
)
from slackwater.policy.compiled import copy_row, jit_compile, stable_order
from slackwater.policy.placement.arrival import ArrivingJob, ScanLimits
from slackwater.policy.placement.cycle_fitting import (
    MAX_ROUNDS,
    drain_cost,
    find_users,
    fit_cycle,
    remaining_life_s,
)
from slackwater.policy.placement.group_scan import count_bits, free_slots, lowest_bits

# Groups tried for one arrival. First come those whose nodes must be rented the least longer for it.
_MAX_GROUPS_TRIED = 256
# Choices of nodes of one group that are fitted exactly. First come those with the idlest nodes.
_MAX_PINNINGS_TRIED = 64


@jit_compile
def train_share(work: Floats, pins: Ints, members: int) -> float:
    """The share of the train nodes' time that the members need at least, if each uses up its
    budget.
    """
    share = 0.0
    for j in range(members):
        busy = work[TRAIN_S, j] + (work[ROLL_S, j] if pins[j] == 0 else 0.0)
        share += busy * work[LEFT, j] / max(work[BUDGET_S, j], 1e-9)
    return share


@jit_compile
def train_shares(rows: int, members: Ints, work: Floats, pins: Ints, most: int) -> Floats:
    """`train_share` of every group with at most `most` members; infinite for other groups."""
    shares = np.full(rows, np.inf)
    for row in range(rows):
        if 0 < members[row] <= most:
            shares[row] = train_share(work[row], pins[row], members[row])
    return shares


@jit_compile
def _find_equivalent_nodes(
    work: Floats,
    pins: Ints,
    members: int,
    node_mask: int,
    node_gb: Floats,
    job: ArrivingJob,
    limits: ScanLimits,
) -> Ints:
    """The group's rollout nodes with time and memory for the job, as sets of equivalent nodes,
    which the same members use; the idlest set first.
    """
    sets, users = np.zeros(MAX_ROLLOUT_NODES, np.int64), np.zeros(MAX_ROLLOUT_NODES, np.int64)
    shares = np.zeros(MAX_ROLLOUT_NODES)
    count = 0
    node = 0
    while node_mask >> node:
        if (node_mask >> node) & 1 and node_gb[
            node
        ] + job.rollout_gb <= limits.rollout_node_gb + 1e-9:
            own = find_users(node, pins, members)
            at = 0
            while at < count and users[at] != own:
                at += 1
            if at == count:
                share = job.rollout_s * job.left / job.budget_s
                for j in range(members):
                    if (own >> j) & 1:
                        share += work[ROLL_S, j] * work[LEFT, j] / work[BUDGET_S, j]
                if share > 1.0 + 1e-9:
                    node += 1
                    continue
                users[at], shares[at] = own, share
                count += 1
            sets[at] |= 1 << node
        node += 1
    found = np.empty(count, np.int64)
    order = stable_order(shares[:count])
    for i in range(count):
        found[i] = sets[order[i]]
    return found


@jit_compile
def _take_first(sizes: Ints, taken: Ints, begin: int, wanted: int) -> bool:
    """Take `wanted` nodes from the sets from `begin` on, as many as possible from the first ones;
    False if there are too few.
    """
    for i in range(begin, len(sizes)):
        taken[i] = min(sizes[i], wanted)
        wanted -= taken[i]
    return bool(wanted == 0)


@jit_compile
def _take_next(sizes: Ints, taken: Ints) -> bool:
    """The next choice of the same number of nodes; False after the last."""
    behind = 0
    for i in range(len(sizes) - 1, -1, -1):
        if taken[i] > 0:
            later = 0
            for k in range(i + 1, len(sizes)):
                later += sizes[k]
            if behind + 1 <= later:
                taken[i] -= 1
                return _take_first(sizes, taken, i + 1, behind + 1)
        behind += taken[i]
    return False


@jit_compile
def _cheapest_pinning(
    trial: Floats,
    pins: Ints,
    members: int,
    node_mask: int,
    node_sets: Ints,
    train_nodes: int,
    wanted: int,
    new: int,
    limits: ScanLimits,
    starts: Floats,
    spent: Ints,
) -> tuple[int, float]:
    """The cheapest pinning of the last member on `wanted - new` existing nodes and `new` added
    ones. Returns the existing nodes (or -1) and the cost.

    Nodes of one set are equivalent, so only the number taken from each set counts.
    """
    best_kept, best_cost = -1, np.inf
    no_delay, prices = np.zeros(members), (train_nodes, limits.rollout_price, limits.train_price)
    sizes, taken = np.empty(len(node_sets), np.int64), np.zeros(len(node_sets), np.int64)
    for i in range(len(node_sets)):
        sizes[i] = count_bits(node_sets[i])
    more = _take_first(sizes, taken, 0, wanted - new)
    for _ in range(_MAX_PINNINGS_TRIED):
        if not more or spent[0] >= limits.max_work:
            break
        kept = 0
        for i in range(len(node_sets)):
            kept |= lowest_bits(node_sets[i], taken[i])
        pins[members - 1] = kept | free_slots(node_mask, new)
        cycle = fit_cycle(trial, pins, members, starts, spent)
        if cycle > 0.0:
            cost = drain_cost(trial, pins, members, cycle, no_delay, prices)
            if cost < best_cost or (cost == best_cost and kept < best_kept):
                best_kept, best_cost = kept, cost
        more = _take_next(sizes, taken)
    return best_kept, best_cost


@jit_compile
def _local_cost(
    trial: Floats,
    pins: Ints,
    members: int,
    train_nodes: int,
    job: ArrivingJob,
    limits: ScanLimits,
    starts: Floats,
    spent: Ints,
) -> float:
    """The cost if the last member rolls out on the train nodes; infinite if that does not fit."""
    last = members - 1
    pins[last] = 0
    trial[ROLL_S, last] = job.local_work_s / train_nodes + job.switch_s
    trial[SYNC_S, last] = 0.0
    cost = np.inf
    cycle = fit_cycle(trial, pins, members, starts, spent)
    if cycle > 0.0:
        prices = (train_nodes, limits.rollout_price, limits.train_price)
        cost = drain_cost(trial, pins, members, cycle, np.zeros(members), prices)
    trial[ROLL_S, last], trial[SYNC_S, last] = job.rollout_s, job.sync_s
    return cost


@jit_compile
def _cheapest_way_in(
    trial: Floats,
    pins: Ints,
    members: int,
    node_mask: int,
    node_gb: Floats,
    train_gb: float,
    train_nodes: int,
    extension_cost: float,
    current_cost: float,
    cost_to_beat: float,
    job: ArrivingJob,
    limits: ScanLimits,
    starts: Floats,
    spent: Ints,
) -> tuple[int, int, float]:
    """The cheapest way into one group: the existing nodes used (or -1), the number of new nodes,
    and the added cost.
    """
    best_kept, best_new, best_cost = -1, 0, cost_to_beat
    wanted = job.rollout_nodes
    present = count_bits(node_mask)
    if (
        extension_cost < best_cost
        and train_gb + job.rollout_gb + job.train_gb <= limits.train_node_gb + 1e-9
    ):
        cost = (
            _local_cost(trial, pins, members, train_nodes, job, limits, starts, spent)
            - current_cost
        )
        if cost < best_cost:
            best_kept, best_new, best_cost = 0, 0, cost
    node_sets = _find_equivalent_nodes(trial, pins, members - 1, node_mask, node_gb, job, limits)
    for new in range(max(wanted - present, 0), min(wanted, limits.free_rollout_nodes) + 1):
        least = extension_cost + new * limits.rollout_price * job.solo_life_h
        if least >= best_cost or present + new > limits.max_rollout_nodes:
            break
        kept, cost = _cheapest_pinning(
            trial,
            pins,
            members,
            node_mask,
            node_sets,
            train_nodes,
            wanted,
            new,
            limits,
            starts,
            spent,
        )
        if kept >= 0 and cost - current_cost < best_cost - 1e-9:
            best_kept, best_new, best_cost = kept, new, cost - current_cost
    return best_kept, best_new, best_cost


@jit_compile
def _extension_costs(
    rows: int,
    members: Ints,
    train_nodes: Ints,
    train_gb: Floats,
    work: Floats,
    pins: Ints,
    cycle_s: Floats,
    job: ArrivingJob,
    limits: ScanLimits,
) -> Floats:
    """A lower bound on the added cost, by group: the rent of its train nodes from the end of its
    own jobs to the end of the arriving job. Infinite where the job does not fit.
    """
    costs = np.full(rows, np.inf)
    for row in range(rows):
        count, nodes = members[row], train_nodes[row]
        if (
            count == 0
            or count >= limits.max_members
            or train_gb[row] + job.train_gb > limits.train_node_gb + 1e-9
        ):
            continue
        more = (job.train_work_s / nodes + job.switch_s) * job.left / job.budget_s
        if train_share(work[row], pins[row], count) + more > 1.0 + 1e-9:
            continue
        beyond_h = job.solo_life_h - remaining_life_s(work[row], count, cycle_s[row]) / 3600.0
        costs[row] = max(beyond_h, 0.0) * nodes * limits.train_price
    return costs


@jit_compile
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
    limits: ScanLimits,
) -> tuple[int, int, int, float]:
    """Row, existing nodes used, new rollout nodes and added cost of the cheapest place; row -1 if
    none costs less than `limits.cost_to_beat`.
    """
    best_row, best_pins, best_new, best_cost = -1, 0, 0, limits.cost_to_beat
    trial = np.zeros((work.shape[1], MAX_MEMBERS + 1))
    pinned = np.zeros(MAX_MEMBERS + 1, np.int64)
    starts = np.zeros((MAX_MEMBERS + 1, 2, MAX_ROUNDS))
    no_delay, spent = np.zeros(MAX_MEMBERS + 1), np.zeros(1, np.int64)
    extension = _extension_costs(
        rows, members, train_nodes, train_gb, work, pins, cycle_s, job, limits
    )
    for row in stable_order(extension)[:_MAX_GROUPS_TRIED]:
        if extension[row] >= best_cost or spent[0] >= limits.max_work:
            break
        count, nodes = members[row], train_nodes[row]
        for column in range(len(trial)):
            copy_row(trial[column], work[row, column], count)
        copy_row(pinned, pins[row], count)
        trial[ROLL_S, count] = job.rollout_s
        trial[TRAIN_S, count] = job.train_work_s / nodes + job.switch_s
        trial[SYNC_S, count], trial[BUDGET_S, count] = job.sync_s, job.budget_s
        trial[LEFT, count], trial[CAP_S, count] = job.left, job.cap_s
        prices = (nodes, limits.rollout_price, limits.train_price)
        current_cost = drain_cost(trial, pinned, count, cycle_s[row], no_delay, prices)
        kept, new, cost = _cheapest_way_in(
            trial, pinned, count + 1, node_mask[row], node_gb[row], train_gb[row], nodes,
            extension[row], current_cost, best_cost, job, limits, starts, spent,
        )  # fmt: skip
        if kept >= 0:
            best_row, best_pins, best_new, best_cost = row, kept, new, cost
    return best_row, best_pins, best_new, best_cost
