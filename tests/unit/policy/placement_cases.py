"""Small factories for placement tests."""

import numpy as np

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.policy.placement.fleet import FleetView

KINDS = (
    ((50, 100), (50, 100)),
    ((200, 300), (200, 300)),
    ((400, 600), (100, 200)),
    ((50, 100), (200, 400)),
)


def fleet(rollout: int = 200, train: int = 200) -> FleetView:
    return FleetView(Pool(Role.ROLLOUT, H20, rollout), Pool(Role.TRAIN, H800, train))


def job(
    name: str,
    rollout_s: float,
    train_s: float,
    slo: float = 1.5,
    *,
    rollout_nodes: int = 1,
    train_nodes: int = 1,
    train_state_gb: float = 240.0,
) -> JobSpec:
    profile = JobProfile(
        rollout_s,
        train_s,
        rollout_nodes=rollout_nodes,
        train_nodes=train_nodes,
        train_state_gb=train_state_gb,
    )
    return JobSpec(JobId(name), 0.0, 300, slo, profile)


def drawn_jobs(seed: int, count: int) -> list[JobSpec]:
    """A mix of lengths, sync times, gangs, iterations and bounds."""
    draw = np.random.default_rng(seed)
    jobs = []
    for number in range(count):
        rollout, train = KINDS[int(draw.integers(len(KINDS)))]
        nodes = int(draw.choice([1, 1, 1, 2]))
        profile = JobProfile(
            float(draw.uniform(*rollout)),
            float(draw.uniform(*train)),
            float(draw.choice([0.0, 6.0])),
            rollout_nodes=nodes,
            train_nodes=nodes,
            rollout_state_gb=float(draw.uniform(200, 500)),
            train_state_gb=float(draw.uniform(200, 500)),
        )
        iterations, slo = int(draw.integers(3, 400)), float(draw.uniform(1, 2))
        jobs.append(JobSpec(JobId(f"job-{number}"), 0.0, iterations, slo, profile))
    return jobs
