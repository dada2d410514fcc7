"""The cheapest layout of a few jobs in one group: where each job rolls out, and in which cycle.

All layouts are tried: each job rolls out on the train nodes, on its own rollout nodes, or on
rollout nodes that it shares. A job whose nodes change must restart; the time of the restart is
taken from its budget and added to its duration.
"""

import numpy as np

from slackwater.policy.columns import (
    BUDGET_S,
    CAP_S,
    LEFT,
    ROLL_S,
    ROUNDS,
    SYNC_S,
    TRAIN_S,
    WORK_ROWS,
    Floats,
    Ints,
)
from slackwater.policy.compiled import copy_row, jit_compile
from slackwater.policy.placement.arrival import ScanLimits
from slackwater.policy.placement.cycle_fitting import (
    MAX_ROUNDS,
    drain_cost,
    fit_cycle,
)
from slackwater.policy.placement.group_scan import count_bits, free_slots, lowest_bits

# Rows of `jobs`; each column is a job. HERE is 1 if the job is on the group's train nodes already,
# with the given pins.
(
    REMOTE_S,
    LOCAL_S,
    OWN_TRAIN_S,
    OWN_SYNC_S,
    OWN_BUDGET_S,
    OWN_LEFT,
    ROLLOUT_GB,
    TRAIN_GB,
    WANTED,
    MOVE_S,
    HERE,
    OWN_CAP_S,
) = range(12)


@jit_compile
def next_partition(block: Ints, jobs: int) -> bool:
    """The next partition of the jobs into blocks that share nodes; block 0 rolls out on the train
    nodes. False after the last.
    """
    for j in range(jobs - 1, -1, -1):
        highest = 0
        for i in range(j):
            highest = max(highest, block[i])
        if block[j] <= highest:
            block[j] += 1
            block[j + 1 :] = 0
            return True
    return False


@jit_compile
def pin_blocks(
    jobs: Floats, current: Ints, block: Ints, count: int, node_mask: int, pins: Ints
) -> int:
    """Assign rollout nodes to every block: those that a member has already, else new ones. Return
    the number of new nodes.
    """
    claimed = 0
    added = 0
    for b in range(1, count + 1):
        size = 0
        for j in range(count):
            if block[j] == b:
                size = max(size, int(jobs[WANTED, j]))
        nodes = 0
        for j in range(count):
            if (
                nodes == 0
                and block[j] == b
                and jobs[HERE, j] == 1.0
                and current[j] & claimed == 0
                and count_bits(current[j]) == size
            ):
                nodes = current[j]
        if nodes == 0 and size:
            nodes = free_slots(node_mask | claimed, size)
            added += size
        claimed |= nodes
        for j in range(count):
            if block[j] == b:
                pins[j] = lowest_bits(nodes, int(jobs[WANTED, j]))
    for j in range(count):
        if block[j] == 0:
            pins[j] = 0
    return added


@jit_compile
def _memory_allows(
    jobs: Floats, block: Ints, count: int, rollout_gb: float, train_gb: float
) -> bool:
    for b in range(count + 1):
        used = 0.0
        for j in range(count):
            if block[j] == b:
                used += jobs[ROLLOUT_GB, j]
            if b == 0:
                used += jobs[TRAIN_GB, j]
        if used > (train_gb if b == 0 else rollout_gb) + 1e-9:
            return False
    return True


@jit_compile
def _fill_work(
    jobs: Floats, current: Ints, pins: Ints, count: int, work: Floats, delay_s: Floats
) -> None:
    for j in range(count):
        local = pins[j] == 0
        moved = jobs[HERE, j] == 0.0 or (jobs[HERE, j] == 1.0 and pins[j] != current[j])
        delay_s[j] = jobs[MOVE_S, j] if moved else 0.0
        work[ROLL_S, j] = jobs[LOCAL_S, j] if local else jobs[REMOTE_S, j]
        work[TRAIN_S, j] = jobs[OWN_TRAIN_S, j]
        work[SYNC_S, j] = 0.0 if local else jobs[OWN_SYNC_S, j]
        work[BUDGET_S, j] = jobs[OWN_BUDGET_S, j] - delay_s[j]
        work[LEFT, j] = jobs[OWN_LEFT, j]
        work[CAP_S, j] = jobs[OWN_CAP_S, j]


@jit_compile
def _least_cost(
    work: Floats, pins: Ints, count: int, delay_s: Floats, train_nodes: int, limits: ScanLimits
) -> float:
    """A lower bound on the cost of a layout: no job ever waits for another."""
    longest = 0.0
    used = 0
    for j in range(count):
        used |= pins[j]
        alone = work[ROLL_S, j] + work[TRAIN_S, j] + work[SYNC_S, j]
        longest = max(longest, alone * work[LEFT, j] + delay_s[j])
    cost = longest * train_nodes * limits.train_price
    node = 0
    while used >> node:
        life = 0.0
        for j in range(count):
            if (pins[j] >> node) & 1:
                alone = work[ROLL_S, j] + work[TRAIN_S, j] + work[SYNC_S, j]
                life = max(life, alone * work[LEFT, j] + delay_s[j])
        cost += life * limits.rollout_price
        node += 1
    return float(cost / 3600.0)


@jit_compile
def _restart_cost(
    pins: Ints, delay_s: Floats, train_nodes: int, limits: ScanLimits, risk_h: float
) -> float:
    cost = 0.0
    for j in range(len(pins)):
        if delay_s[j] > 0.0:
            price = train_nodes * limits.train_price + count_bits(pins[j]) * limits.rollout_price
            cost += (delay_s[j] / 3600.0 + risk_h) * price
    return cost


@jit_compile
def fit_layout(
    jobs: Floats,
    current: Ints,
    pins: Ints,
    work: Floats,
    delay_s: Floats,
    starts: Floats,
    spent: Ints,
) -> float:
    """Fit a cycle for jobs with the given pins. Return its period, or 0 if there is none; write its
    rounds to `work` and its starts to `starts`.
    """
    count = jobs.shape[1]
    _fill_work(jobs, current, pins, count, work, delay_s)
    if count > 1:
        return fit_cycle(work, pins, count, starts, spent)
    work[ROUNDS, 0] = 1.0
    starts[0, 0, 0], starts[0, 1, 0] = 0.0, work[ROLL_S, 0]
    alone = work[ROLL_S, 0] + work[TRAIN_S, 0] + work[SYNC_S, 0]
    return float(alone) if alone * work[LEFT, 0] <= work[BUDGET_S, 0] * (1 + 1e-9) else 0.0


@jit_compile
def best_layout(
    jobs: Floats,
    current: Ints,
    node_mask: int,
    train_nodes: int,
    limits: ScanLimits,
    risk_h: float,
    best_pins: Ints,
    spent: Ints,
) -> float:
    """Find the cheapest layout and write its pins to `best_pins`. Return the cost until all jobs
    are done, or infinity if no layout costs less than `limits.cost_to_beat`. Each restart costs the
    rent of its nodes while it lasts, and for `risk_h` more. The search effort is added to `spent`.
    """
    count = jobs.shape[1]
    block, pins = np.zeros(count, np.int64), np.zeros(count, np.int64)
    work, delay_s = np.zeros((WORK_ROWS, count)), np.zeros(count)
    starts = np.zeros((count, 2, MAX_ROUNDS))
    prices = (train_nodes, limits.rollout_price, limits.train_price)
    best = limits.cost_to_beat
    found = False
    more = True
    while more:
        if _memory_allows(jobs, block, count, limits.rollout_node_gb, limits.train_node_gb):
            added = pin_blocks(jobs, current, block, count, node_mask, pins)
            _fill_work(jobs, current, pins, count, work, delay_s)
            least = _least_cost(work, pins, count, delay_s, train_nodes, limits)
            cycle = 0.0
            if added <= limits.free_rollout_nodes and least < best:
                cycle = fit_layout(jobs, current, pins, work, delay_s, starts, spent)
            if cycle > 0.0:
                cost = drain_cost(work, pins, count, cycle, delay_s, prices)
                cost += _restart_cost(pins, delay_s, train_nodes, limits, risk_h)
                if cost < best - 1e-9:
                    best, found = cost, True
                    copy_row(best_pins, pins, len(pins))
        more = next_partition(block, count)
    return float(best) if found else np.inf
