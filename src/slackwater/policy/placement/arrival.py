"""What compiled scans are told of one arriving job and of the room there is for it, by name."""

import math
from typing import NamedTuple

from slackwater.model.job import JobProfile
from slackwater.policy.placement.fleet import FleetView


class ArrivingJob(NamedTuple):
    """Lengths are worst cases. `train_work_s` and `local_work_s` (of rollouts on train nodes) are
    those on one train node, without the `switch_s` that each phase takes on any number of them.

    `bound_s` bounds one iteration; in `budget_s` the job must make the iterations that are `left`,
    which take `life_h` alone. `cap_s` bounds each iteration in a cycle of several, if its SLO does.
    """

    rollout_s: float
    local_work_s: float
    train_work_s: float
    switch_s: float
    sync_s: float
    bound_s: float
    budget_s: float
    left: float
    rollout_gb: float
    train_gb: float
    rollout_nodes: int
    life_h: float
    cap_s: float


def arriving(
    profile: JobProfile, fleet: FleetView, left: int, budget_s: float, cap_s: float = math.inf
) -> ArrivingJob:
    """A job that has `budget_s` for the iterations that are left."""
    switch_s = fleet.switch_s(profile)
    return ArrivingJob(
        rollout_s=float(profile.rollout_s),
        local_work_s=fleet.local_rollout_s(profile, 1) - switch_s,
        train_work_s=fleet.train_s(profile, 1) - switch_s,
        switch_s=switch_s,
        sync_s=float(profile.sync_s),
        bound_s=budget_s / max(left, 1),
        budget_s=float(budget_s),
        left=float(left),
        rollout_gb=float(profile.rollout_state_gb),
        train_gb=float(profile.train_state_gb),
        rollout_nodes=profile.rollout_nodes,
        life_h=left * profile.solo_s / 3600,
        cap_s=cap_s,
    )


class PlacementBudget(NamedTuple):
    """How large a group may be, what is free, what a node holds and costs, the cost that a place
    must beat, and how much work may go into finding one (see `fit_cycle`).
    """

    most_members: int
    free_rollout_nodes: int
    rollout_node_gb: float
    train_node_gb: float
    most_rollout_nodes: int
    rollout_price: float
    train_price: float
    to_beat: float
    most_work: int
