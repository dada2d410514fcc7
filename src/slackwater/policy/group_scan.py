"""Scanning all groups for the cheapest valid place of one arriving job (WEAVE 4.2, Algorithm 1, lines 3 to 14)."""

import numpy as np

from slackwater.policy.compiled import compiled
from slackwater.policy.group_table import MAX_MEMBERS, Floats, Ints
from slackwater.policy.round_robin_cycle import (
    TOLERANCE_S,
    load_s,
    longest_solo_s,
    round_robin_period_s,
)


@compiled
def next_choice(mask: int) -> int:
    """The next larger mask with as many bits."""
    low = mask & -mask
    high = mask + low
    return high | (((mask ^ high) >> 2) // low)


@compiled
def spread_bits(choice: int, nodes: int) -> int:
    """The i-th bit of `choice` moved to the i-th set bit of `nodes`."""
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


@compiled
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


@compiled
def memory_allows(pins: int, node_gb: Floats, state_gb: float, memory_gb: float) -> bool:
    """Whether every pinned node can keep the job's rollout state."""
    node = 0
    while pins >> node:
        if (pins >> node) & 1 and node_gb[node] + state_gb > memory_gb + 1e-9:
            return False
        node += 1
    return True


@compiled
def try_group(
    row: int,
    roll_s: Floats,
    train_s: Floats,
    sync_s: Floats,
    pins: Ints,
    members: int,
    tightest_s: float,
    node_mask: int,
    node_gb: Floats,
    state_gb: float,
    memory_gb: float,
    wanted: int,
    new_nodes_max: int,
    new_slots_max: int,
) -> tuple[int, int, float]:
    """Cheapest pinning of the last member: (pins or -1, new nodes, meta-iteration). Others are pinned already."""
    nodes = 0
    while node_mask >> nodes:
        nodes += 1
    present = 0
    for node in range(nodes):
        present += (node_mask >> node) & 1
    last = members - 1
    for new in range(wanted + 1):
        existing = wanted - new
        if existing > present or new > new_nodes_max or present + new > new_slots_max:
            continue
        best_pins, best_s = -1, np.inf
        choice = (1 << existing) - 1
        while True:
            pinned = spread_bits(choice, node_mask)
            if memory_allows(pinned, node_gb, state_gb, memory_gb):
                pins[last] = pinned | free_slots(node_mask, new)
                if load_s(roll_s, train_s, pins, members) <= tightest_s + TOLERANCE_S:
                    period = round_robin_period_s(roll_s, train_s, sync_s, pins, members)
                    if period <= tightest_s + TOLERANCE_S and period < best_s - TOLERANCE_S:
                        best_pins, best_s = pinned, period
            if existing == 0:
                break
            choice = next_choice(choice)
            if choice >> present:
                break
        if best_pins >= 0:
            return best_pins, new, best_s
    return -1, 0, np.inf


@compiled
def scan_groups(
    rows: int,
    members: Ints,
    train_nodes: Ints,
    node_mask: Ints,
    train_gb: Floats,
    node_gb: Floats,
    roll_s: Floats,
    train_s: Floats,
    sync_s: Floats,
    bound_s: Floats,
    pins: Ints,
    job: Floats,
    limits: Floats,
) -> tuple[int, int, int, float]:
    """Row, pins, new rollout nodes and slack of the best place; row -1 if none is valid.

    `job`: rollout s, train s on one node, sync s, bound s, rollout GB, train GB, rollout nodes wanted.
    `limits`: largest group, free rollout nodes, rollout node GB, train node GB, most rollout nodes a group may have.
    """
    best_row, best_pins, best_new, best_slack = -1, 0, 1 << 30, -np.inf
    wanted = int(job[6])
    roll, train = np.zeros(MAX_MEMBERS + 1), np.zeros(MAX_MEMBERS + 1)
    sync, pinned = np.zeros(MAX_MEMBERS + 1), np.zeros(MAX_MEMBERS + 1, np.int64)
    for row in range(rows):
        count = members[row]
        if count == 0 or count >= limits[0] or train_gb[row] + job[5] > limits[3] + 1e-9:
            continue
        longest = longest_solo_s(roll_s[row], train_s[row], sync_s[row], count)
        if load_s(roll_s[row], train_s[row], pins[row], count) >= longest:
            continue
        tightest = job[3]
        for j in range(count):
            tightest = min(tightest, bound_s[row, j])
            roll[j], train[j], sync[j] = roll_s[row, j], train_s[row, j], sync_s[row, j]
            pinned[j] = pins[row, j]
        roll[count], train[count], sync[count] = job[0], job[1] / train_nodes[row], job[2]
        if max(longest, roll[count] + train[count] + sync[count]) > tightest + TOLERANCE_S:
            continue
        found, new, period = try_group(
            row,
            roll,
            train,
            sync,
            pinned,
            count + 1,
            tightest,
            node_mask[row],
            node_gb[row],
            job[4],
            limits[2],
            wanted,
            min(int(limits[1]), best_new),
            int(limits[4]),
        )
        slack = (tightest - period) / tightest
        if found >= 0 and (new < best_new or slack > best_slack + 1e-12):
            best_row, best_pins, best_new, best_slack = row, found, new, slack
    return best_row, best_pins, best_new, best_slack
