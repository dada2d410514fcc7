"""Fit jobs with different periods into one repeating cycle of a group.

In a cycle of period P, job j makes k_j iterations (its rounds), as many as its budget needs. Phases
are planned with their worst-case lengths. So an iteration of job j takes at most P / k_j on
average, whatever the real lengths are: under a fixed order on every node, shorter phases make
nothing later. If every job makes one iteration per cycle, the round-robin order of
`round_robin_cycle` is tried first.
"""

import numpy as np

from slackwater.policy.columns import (
    BUDGET_S,
    CAP_S,
    LEFT,
    MAX_ROLLOUT_NODES,
    ROLL_S,
    ROUNDS,
    SYNC_S,
    TRAIN_S,
    Floats,
    Ints,
)
from slackwater.policy.compiled import jit_compile, stable_order
from slackwater.policy.ordering.round_robin_cycle import (
    TOLERANCE_S,
    round_robin_period_s,
    round_robin_starts_s,
)
from slackwater.policy.placement.iteration_caps import has_caps, keeps_caps
from slackwater.policy.placement.ring import insert_chain

MAX_ROUNDS = 8
_PERIODS_TRIED = 6
_CAPPED_PERIODS_TRIED = 16  # caps reject many periods in which all work fits
# Candidate periods, as multiples of the lower bound.
_SLACKS = (1.0, 1.05, 1.12, 1.25, 1.4, 1.6)


@jit_compile
def min_rounds(period_s: float, budget_s: float, left: float, longest_s: float) -> int:
    """The fewest iterations per cycle that finish `left` iterations within `budget_s`, if one cycle
    and one phase are lost at the start; 0 if not even `MAX_ROUNDS` do.
    """
    cycles = (budget_s - longest_s) / period_s - 1.0
    if cycles * MAX_ROUNDS < left:
        return 0
    return max(int(np.ceil(left / cycles - 1e-9)), 1)


@jit_compile
def choose_rounds(work: Floats, members: int, period_s: float, longest_s: float) -> bool:
    """Set every member's rounds for a period; False if a member cannot keep its budget."""
    for j in range(members):
        rounds = min_rounds(period_s, work[BUDGET_S, j], work[LEFT, j], longest_s)
        if rounds == 0:
            return False
        work[ROUNDS, j] = rounds
    return True


@jit_compile
def min_cycle_s(work: Floats, pins: Ints, members: int) -> float:
    """A lower bound on the cycle: the work on the busiest node, or the longest member's iterations
    one after another. Most fitted cycles come near it.
    """
    busiest = 0.0
    train = 0.0
    used = 0
    for j in range(members):
        roll = work[ROUNDS, j] * work[ROLL_S, j]
        own = work[ROUNDS, j] * work[TRAIN_S, j]
        busiest = max(busiest, roll + own + work[ROUNDS, j] * work[SYNC_S, j])
        used |= pins[j]
        train += own
        if pins[j] == 0:
            train += roll
    busiest = max(busiest, train)
    node = 0
    while used >> node:
        load = 0.0
        for j in range(members):
            if (pins[j] >> node) & 1:
                load += work[ROUNDS, j] * work[ROLL_S, j]
        busiest = max(busiest, load)
        node += 1
    return busiest


@jit_compile
def _try_round_robin(
    work: Floats, pins: Ints, members: int, period_s: float, starts: Floats
) -> bool:
    """Use the round-robin order if every member makes one iteration on rollout nodes, and the order
    keeps the period and the caps. Return whether it does.
    """
    longest_s = period_s
    for j in range(members):
        if work[ROUNDS, j] != 1 or pins[j] == 0:
            return False
        longest_s = min(longest_s, work[CAP_S, j])
    if round_robin_period_s(work, pins, members) > longest_s + TOLERANCE_S:
        return False
    at = round_robin_starts_s(work, pins, members, period_s)
    for j in range(members):
        starts[j, 0, 0], starts[j, 1, 0] = at[j], at[members + j]
    return True


@jit_compile
def interleave(
    work: Floats, pins: Ints, members: int, period_s: float, starts: Floats, spent: Ints
) -> bool:
    """Fill `starts[member, phase, round]` with times that repeat every period; False if no schedule
    is found.

    A member's iterations form a chain. It begins within the cycle and may run beyond its end, so
    start times can exceed the period.
    """
    if _try_round_robin(work, pins, members, period_s, starts):
        return True
    nodes = 1
    phases = 0
    for j in range(members):
        phases += 2 * int(work[ROUNDS, j])
        while pins[j] >> (nodes - 1):
            nodes += 1
    at, length = np.empty((nodes, phases)), np.empty((nodes, phases))
    weight = np.zeros(members)
    for attempt in range(3):
        for j in range(members):
            rounds = 1.0 if attempt == 2 else work[ROUNDS, j]
            chain = work[TRAIN_S, j] if attempt == 1 else work[ROLL_S, j] + work[TRAIN_S, j]
            weight[j] = -rounds * chain
        count = np.zeros(nodes, np.int64)
        placed = 0
        for j in stable_order(weight):
            rounds = int(work[ROUNDS, j])
            spent[0] += rounds * (1 + count[0])
            if not insert_chain(work, j, pins[j], rounds, at, length, count, period_s, starts[j]):
                break
            placed += 1
        if placed == members and keeps_caps(work, pins, members, period_s, starts):
            return True
    return False


@jit_compile
def _shortest_period_s(
    work: Floats, pins: Ints, members: int, period_s: float, starts: Floats, spent: Ints
) -> float:
    """The shortest of several periods up to `period_s` in which the members' rounds fit; 0 if none.
    A shorter period makes all members faster at no cost.
    """
    least = min_cycle_s(work, pins, members)
    for slack in _SLACKS:
        if least * slack >= period_s:
            break
        if interleave(work, pins, members, least * slack, starts, spent):
            return float(least * slack)
    return period_s if interleave(work, pins, members, period_s, starts, spent) else 0.0


@jit_compile
def _add_round(work: Floats, pins: Ints, members: int, period_s: float) -> bool:
    """Give one more round to the capped member that is idle most, so that it waits less in each
    iteration; False if the period has no time for it.
    """
    idlest, least = 0, np.inf
    for j in range(members):
        alone = work[ROLL_S, j] + work[TRAIN_S, j] + work[SYNC_S, j]
        if work[CAP_S, j] < np.inf and alone * work[ROUNDS, j] < least:
            idlest, least = j, alone * work[ROUNDS, j]
    work[ROUNDS, idlest] += 1
    return work[ROUNDS, idlest] <= MAX_ROUNDS and min_cycle_s(work, pins, members) <= period_s


@jit_compile
def _is_infeasible(work: Floats, pins: Ints, members: int) -> bool:
    """Whether the members cannot share: one misses its budget even alone, or a node would be busy
    more than all the time even if every member used up its budget.
    """
    used = 0
    train = 0.0
    for j in range(members):
        alone = work[ROLL_S, j] + work[TRAIN_S, j] + work[SYNC_S, j]
        if alone * work[LEFT, j] > work[BUDGET_S, j]:
            return True
        used |= pins[j]
        busy = work[TRAIN_S, j] + (work[ROLL_S, j] if pins[j] == 0 else 0.0)
        train += busy * work[LEFT, j] / work[BUDGET_S, j]
    if train > 1.0:
        return True
    node = 0
    while used >> node:
        share = 0.0
        for j in range(members):
            if (pins[j] >> node) & 1:
                share += work[ROLL_S, j] * work[LEFT, j] / work[BUDGET_S, j]
        if share > 1.0:
            return True
        node += 1
    return False


@jit_compile
def find_users(node: int, pins: Ints, members: int) -> int:
    """The members that are pinned to a node, as a bit mask."""
    users = 0
    for j in range(members):
        users |= ((pins[j] >> node) & 1) << j
    return users


@jit_compile
def _drop_equivalent_nodes(pins: Ints, members: int) -> Ints:
    """Keep one node of each set of nodes that the same members use. The others are always busy at
    the same times, so fitting them again only costs time.
    """
    used = 0
    for j in range(members):
        used |= pins[j]
    seen = np.empty(MAX_ROLLOUT_NODES, np.int64)
    unlike = np.zeros(members, np.int64)
    count = 0
    node = 0
    while used >> node:
        users = find_users(node, pins, members)
        known = users == 0
        for i in range(count):
            known = known or seen[i] == users
        if not known:
            seen[count] = users
            for j in range(members):
                unlike[j] |= ((users >> j) & 1) << count
            count += 1
        node += 1
    return unlike


@jit_compile
def fit_cycle(work: Floats, pins: Ints, members: int, starts: Floats, spent: Ints) -> float:
    """Find a cycle: set every member's rounds and starts, and return the period, or 0 if there is
    no cycle.

    The candidates are the longest periods for each number of rounds of each member. Those with the
    smallest load are tried first. The search effort is added to `spent`.
    """
    spent[0] += members * members
    if _is_infeasible(work, pins, members):
        return 0.0
    pins = _drop_equivalent_nodes(pins, members)
    longest = 0.0
    for j in range(members):
        longest = max(longest, work[ROLL_S, j], work[TRAIN_S, j])
    periods = np.empty(members * MAX_ROUNDS)
    shares = np.empty(members * MAX_ROUNDS)
    count = 0
    for j in range(members):
        for k in range(1, MAX_ROUNDS + 1):
            period = (work[BUDGET_S, j] - longest) * k / (work[LEFT, j] + k)
            if period > 0.0 and choose_rounds(work, members, period, longest):
                share = min_cycle_s(work, pins, members) / period
                if share <= 1.0 + 1e-9:
                    periods[count], shares[count] = period, share
                    count += 1
    order = stable_order(shares[:count])
    capped = has_caps(work, members)
    for i in order[: _CAPPED_PERIODS_TRIED if capped else _PERIODS_TRIED]:
        choose_rounds(work, members, periods[i], longest)
        # A long period spreads iterations out, which can break caps that a shorter one keeps.
        if not (capped or interleave(work, pins, members, periods[i], starts, spent)):
            continue
        found = _shortest_period_s(work, pins, members, periods[i], starts, spent)
        while found == 0.0 and _add_round(work, pins, members, periods[i]):
            found = _shortest_period_s(work, pins, members, periods[i], starts, spent)
        if found > 0.0:
            return found
    return 0.0


@jit_compile
def remaining_life_s(work: Floats, members: int, cycle_s: float) -> float:
    """How long until the group's last member ends."""
    longest = 0.0
    for j in range(members):
        longest = max(longest, work[LEFT, j] * cycle_s / work[ROUNDS, j])
    return longest


@jit_compile
def drain_cost(
    work: Floats,
    pins: Ints,
    members: int,
    cycle_s: float,
    delay_s: Floats,
    prices: tuple[int, float, float],
) -> float:
    """The rent of a group's nodes until its members are done; each node is paid for as long as a
    member needs it. `prices` holds the number of train nodes, and the hourly prices of a rollout
    and of a train node.

    When a member is done, the cycle shrinks to the work of the others.
    """
    train_nodes, rollout_price, train_price = prices
    rest = work[:, :members].copy()
    cycles = rest[LEFT] / rest[ROUNDS]
    life_s = delay_s[:members].copy()
    now_s, done = 0.0, 0.0
    for j in stable_order(cycles):
        if cycles[j] > done:
            if done > 0.0:
                cycle_s = min(cycle_s, min_cycle_s(rest, pins, members))
            now_s += (cycles[j] - done) * cycle_s
            done = cycles[j]
        life_s[j] += now_s
        rest[ROUNDS, j] = 0.0
    used = 0
    for j in range(members):
        used |= pins[j]
    cost = life_s.max() * train_nodes * train_price
    node = 0
    while used >> node:
        life = 0.0
        for j in range(members):
            if (pins[j] >> node) & 1:
                life = max(life, life_s[j])
        cost += life * rollout_price
        node += 1
    return float(cost / 3600.0)
