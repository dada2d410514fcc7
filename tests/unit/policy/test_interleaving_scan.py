"""The place that a scan finds for a gang is the cheapest of all ways to take a group's nodes."""

import itertools
import random

import numpy as np
import pytest

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.model.placement import Strategy
from slackwater.policy.columns import (
    BUDGET_S,
    CAP_S,
    LEFT,
    MAX_ROLLOUT_NODES,
    ROLL_S,
    SYNC_S,
    TRAIN_S,
    WORK_ROWS,
)
from slackwater.policy.placement.arrival import make_arriving_job
from slackwater.policy.placement.cycle_fitting import (
    MAX_ROUNDS,
    drain_cost,
    fit_cycle,
    remaining_life_s,
)
from slackwater.policy.placement.cycle_plan import adopt_cycle, fit_group
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.groups import GroupChoice, GroupRegistry
from slackwater.policy.placement.interleaving_scan import scan_cycles

FLEET = FleetView(Pool(Role.ROLLOUT, H20, 32), Pool(Role.TRAIN, H800, 4))
TO_BEAT = 1e5
WORK = 10**9  # all there is


def gang(draw: random.Random, name: str) -> JobSpec:
    profile = JobProfile(
        *(draw.uniform(50, 200), draw.uniform(20, 100), 5.0),
        rollout_nodes=draw.choice((1, 2, 3)),
        rollout_state_gb=draw.choice((10.0, 900.0)),
        train_state_gb=10.0,
    )
    return JobSpec(JobId(name), 0.0, draw.randint(10, 60), draw.uniform(2.0, 5.0), profile)


def budget_s(spec: JobSpec) -> float:
    return spec.slo * spec.iterations * spec.profile.solo_s


def shared_group(draw: random.Random) -> GroupRegistry | None:
    """One group of up to three gangs, which have some nodes in common; None if they do not fit."""
    registry = GroupRegistry(FLEET)
    for number in range(draw.randint(1, 3)):
        spec = gang(draw, f"member{number}")
        wanted = spec.profile.rollout_nodes
        present = sorted(registry.groups[0].rollout) if number else []
        kept = draw.sample(present, draw.randint(0, min(wanted, len(present))))
        choice = GroupChoice(
            *(0 if number else None, sum(1 << slot for slot in kept), wanted - len(kept)),
            *(0 if number else 1, Strategy.PACK, ""),
        )
        registry.admit(spec, choice, budget_s(spec))
    cycle = fit_group(registry, 0)
    if cycle is None:
        return None
    adopt_cycle(registry, 0, registry.groups[0].jobs, cycle)
    return registry


def cheapest_by_trying_all(registry: GroupRegistry, spec: JobSpec) -> float:
    table, room = registry.table, registry.scan_limits(16, TO_BEAT, WORK)
    profile, count = spec.profile, int(table.members[0])
    prices = (1, room.rollout_price, room.train_price)
    work = np.zeros((WORK_ROWS, count + 1))
    work[:, :count] = table.work[0][:, :count]
    pins = np.append(table.pins[0][:count], 0)
    before = drain_cost(work, pins, count, table.cycle_s[0], np.zeros(count), prices)
    starts, still, spent = (
        np.zeros((count + 1, 2, MAX_ROUNDS)),
        np.zeros(count + 1),
        np.zeros(1, np.int64),
    )
    work[TRAIN_S, -1], work[BUDGET_S, -1] = profile.train_s, budget_s(spec)
    work[LEFT, -1], work[CAP_S, -1] = spec.iterations, np.inf
    present = sorted(registry.groups[0].rollout)
    missing = [slot for slot in range(MAX_ROLLOUT_NODES) if slot not in present]
    life_h = spec.iterations * profile.solo_s / 3600
    ends_h = remaining_life_s(table.work[0], count, table.cycle_s[0]) / 3600
    stay_cost = max(life_h - ends_h, 0.0) * room.train_price
    ways: list[tuple[int, tuple[int, ...]]] = [(-1, ())]  # nodes that are added, and all
    for new in range(profile.rollout_nodes + 1):
        chosen = itertools.combinations(present, profile.rollout_nodes - new)
        ways += [(new, (*kept, *missing[:new])) for kept in chosen]
    best = TO_BEAT
    for new, group in itertools.groupby(ways, key=lambda way: way[0]):
        if stay_cost + max(new, 0) * room.rollout_price * life_h >= best:
            break  # what it would cost at least
        for _, way in group:
            work[ROLL_S, -1] = profile.rollout_s if way else FLEET.local_rollout_s(profile, 1)
            work[SYNC_S, -1] = profile.sync_s if way else 0.0
            pins[-1] = sum(1 << slot for slot in way)
            held = [table.node_gb[0, slot] for slot in way]
            if any(gb + profile.rollout_state_gb > room.rollout_node_gb for gb in held):
                continue
            cycle_s = fit_cycle(work, pins, count + 1, starts, spent)
            if cycle_s:
                cost = drain_cost(work, pins, count + 1, cycle_s, still, prices)
                best = min(best, cost - before)
    return best


def test_a_gang_gets_the_cheapest_of_all_pinnings() -> None:
    draw = random.Random(4)
    found_places = 0
    for _ in range(50):
        registry = shared_group(draw)
        spec = gang(draw, "arrives")
        if registry is None:
            continue
        table = registry.table
        row, _, _, cost = scan_cycles(
            *table.arrays,
            table.cycle_s,
            make_arriving_job(spec.profile, FLEET, spec.iterations, budget_s(spec)),
            registry.scan_limits(16, TO_BEAT, WORK),
        )
        assert cost == pytest.approx(cheapest_by_trying_all(registry, spec))
        found_places += row >= 0
    assert found_places > 8
