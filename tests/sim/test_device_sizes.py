"""Jobs of 1 to 64 devices through the co-scheduler, with crashes, lost nodes and doubled messages:
device invariants hold after every event.
"""

import random

import pytest

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.sim.cluster.scenario import ClusterScenario, FaultConfig, PolicyConfig
from slackwater.sim.cluster.simulate import simulate

SIZES = (1, 1, 2, 3, 4, 8, 16, 64)


def jobs(count: int, seed: int) -> tuple[JobSpec, ...]:
    draw = random.Random(seed)
    found = []
    for number in range(count):
        rollout = draw.choice(SIZES)
        train = draw.choice((rollout, max(rollout // 2, 1)))
        profile = JobProfile(
            *(draw.uniform(100, 400), draw.uniform(50, 300), 10.0),
            rollout_state_gb=5.0,
            train_state_gb=5.0,
            rollout_devices=rollout,
            train_devices=train,
        )
        arrival_s, slo = draw.uniform(0, 200 * count), draw.uniform(1.2, 3)
        found.append(JobSpec(JobId(f"job-{number}"), arrival_s, 6, slo, profile))
    return tuple(found)


@pytest.mark.parametrize("policy", ["ours", "group", "regrouping"])
def test_jobs_of_all_sizes_share_one_fleet_through_a_storm(policy: str) -> None:
    scenario = ClusterScenario(
        fleet=(Pool(Role.ROLLOUT, H20, 10), Pool(Role.TRAIN, H800, 10)),
        jobs=jobs(40, 5),
        policy=PolicyConfig(name=policy, regroup_every_s=1800.0 if policy == "regrouping" else 0.0),
        faults=FaultConfig(
            job_crashes_per_h=4.0, node_losses_per_h=2.0, doubled_message_share=0.05
        ),
        seed=7,
    )
    report = simulate(scenario, check_every=1)
    assert report.finished == 40 and not report.refusals
    assert report.rollout.peak_nodes <= 10 and report.train.peak_nodes <= 10
