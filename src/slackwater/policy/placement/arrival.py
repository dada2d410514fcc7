"""Input of the compiled scans: one arriving job, and the limits of the search for its place."""

import math
from typing import NamedTuple

from slackwater.model.job import JobProfile
from slackwater.policy.placement.fleet import FleetView


class ArrivingJob(NamedTuple):
    """One arriving job, with worst-case phase lengths.

    `train_work_s` and `local_work_s` (a rollout on train nodes) are the work on one train node. The
    time to load the job's state, `switch_s`, is extra: it is the same on any number of nodes.

    The job must make its `left` iterations within `budget_s`; running alone they take
    `solo_life_h`. `bound_s` is the average time for one iteration. `cap_s` limits each single
    iteration, if the SLO is per iteration; otherwise it is infinite.
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
    solo_life_h: float
    cap_s: float


def make_arriving_job(
    profile: JobProfile, fleet: FleetView, left: int, budget_s: float, cap_s: float = math.inf
) -> ArrivingJob:
    """Describe a job that must make its `left` iterations within `budget_s`."""
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
        solo_life_h=left * profile.solo_s / 3600,
        cap_s=cap_s,
    )


class ScanLimits(NamedTuple):
    """Limits of a scan: group size, free nodes, memory and price of a node, the cost that a place
    must beat, and the search effort (`max_work`, in the units that `fit_cycle` counts).
    """

    max_members: int
    free_rollout_nodes: int
    rollout_node_gb: float
    train_node_gb: float
    max_rollout_nodes: int
    rollout_price: float
    train_price: float
    cost_to_beat: float
    max_work: int
