"""Scan all groups for the cheapest valid place of one arriving job (WEAVE 4.2, Algorithm 1, lines 3
to 14).
"""

import numpy as np

from slackwater.policy.columns import (
    BOUND_S,
    MAX_MEMBERS,
    ROLL_S,
    SYNC_S,
    TRAIN_S,
    Floats,
    Ints,
)
from slackwater.policy.compiled import copy_row, jit_compile
from slackwater.policy.ordering.round_robin_cycle import (
    TOLERANCE_S,
    load_s,
    longest_solo_s,
    round_robin_period_s,
)
from slackwater.policy.placement.arrival import ArrivingJob, ScanLimits


@jit_compile
def next_combination(mask: int) -> int:
    """The next larger mask with the same number of set bits."""
    low = mask & -mask
    high = mask + low
    return high | (((mask ^ high) >> 2) // low)


@jit_compile
def deposit_bits(choice: int, nodes: int) -> int:
    """Move the i-th bit of `choice` to the i-th set bit of `nodes`."""
    result = 0
    taken = 0
    node = 0
    while nodes >> node:
        if (nodes >> node) & 1:
            if (choice >> taken) & 1:
                result |= 1 << node
            taken += 1
        node += 1
    return result


@jit_compile
def free_slots(nodes: int, count: int) -> int:
    """The lowest `count` bits that `nodes` does not have."""
    result = 0
    slot = 0
    while count > 0:
        if not (nodes >> slot) & 1:
            result |= 1 << slot
            count -= 1
        slot += 1
    return result


@jit_compile
def lowest_bits(mask: int, count: int) -> int:
    """The lowest `count` bits of a mask."""
    result = 0
    while count > 0:
        low = mask & -mask
        result |= low
        mask ^= low
        count -= 1
    return result


@jit_compile
def memory_allows(pins: int, node_gb: Floats, state_gb: float, memory_gb: float) -> bool:
    """Whether every pinned node can keep the job's rollout state."""
    node = 0
    while pins >> node:
        if (pins >> node) & 1 and node_gb[node] + state_gb > memory_gb + 1e-9:
            return False
        node += 1
    return True


@jit_compile
def count_bits(mask: int) -> int:
    """Set bits of a mask."""
    count = 0
    while mask:
        count += mask & 1
        mask >>= 1
    return count


@jit_compile
def _cheapest_pinning(
    work: Floats,
    pins: Ints,
    members: int,
    tightest_s: float,
    node_mask: int,
    node_gb: Floats,
    job: ArrivingJob,
    limits: ScanLimits,
    new_max: int,
) -> tuple[int, int, float]:
    """The pinning of the last member that needs the fewest new nodes, and among those the shortest
    meta-iteration. Returns the existing nodes it uses (or -1), the number of new nodes, and the
    meta-iteration.
    """
    present = count_bits(node_mask)
    wanted = job.rollout_nodes
    for new in range(max(wanted - present, 0), min(wanted, new_max) + 1):
        if present + new > limits.max_rollout_nodes:
            break
        existing = wanted - new
        best_kept, best_s = -1, np.inf
        choice = (1 << existing) - 1
        while not choice >> present:
            kept = deposit_bits(choice, node_mask)
            if memory_allows(kept, node_gb, job.rollout_gb, limits.rollout_node_gb):
                pins[members - 1] = kept | free_slots(node_mask, new)
                if load_s(work, pins, members) <= tightest_s + TOLERANCE_S:
                    period = round_robin_period_s(work, pins, members)
                    if period <= tightest_s + TOLERANCE_S and period < best_s - TOLERANCE_S:
                        best_kept, best_s = kept, period
            if existing == 0:
                break
            choice = next_combination(choice)
        if best_kept >= 0:
            return best_kept, new, best_s
    return -1, 0, np.inf


@jit_compile
def scan_groups(
    rows: int,
    members: Ints,
    train_nodes: Ints,
    node_mask: Ints,
    train_gb: Floats,
    node_gb: Floats,
    work: Floats,
    pins: Ints,
    job: ArrivingJob,
    limits: ScanLimits,
) -> tuple[int, int, int, float]:
    """Row, existing nodes used, new rollout nodes and slack of the best place; row -1 if none is
    valid.
    """
    best_row, best_pins, best_new, best_slack = -1, 0, limits.free_rollout_nodes, -np.inf
    trial, pinned = np.zeros((work.shape[1], MAX_MEMBERS + 1)), np.zeros(MAX_MEMBERS + 1, np.int64)
    for row in range(rows):
        count = members[row]
        if (
            count == 0
            or count >= limits.max_members
            or train_gb[row] + job.train_gb > limits.train_node_gb + 1e-9
        ):
            continue
        longest = longest_solo_s(work[row], count)
        if load_s(work[row], pins[row], count) >= longest:
            continue
        for column in range(len(trial)):
            copy_row(trial[column], work[row, column], count)
        copy_row(pinned, pins[row], count)
        trial[ROLL_S, count], trial[SYNC_S, count] = job.rollout_s, job.sync_s
        trial[TRAIN_S, count] = job.train_work_s / train_nodes[row] + job.switch_s
        trial[BOUND_S, count] = job.bound_s
        tightest = trial[BOUND_S, : count + 1].min()
        if longest_solo_s(trial, count + 1) > tightest + TOLERANCE_S:
            continue
        kept, new, period = _cheapest_pinning(
            trial, pinned, count + 1, tightest, node_mask[row], node_gb[row], job, limits, best_new
        )
        slack = (tightest - period) / tightest
        if kept >= 0 and (best_row < 0 or new < best_new or slack > best_slack + 1e-12):
            best_row, best_pins, best_new, best_slack = row, kept, new, slack
    return best_row, best_pins, best_new, best_slack
