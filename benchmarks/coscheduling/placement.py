"""`slackwater bench placement`: how long one arrival takes to place among so many concurrent jobs.

Jobs of Table 6's mix are placed until the fleet holds the number asked for; then every further
arrival is timed, with all that the co-scheduler asks a policy for it (how the placed jobs stand,
the placement, the rebalance), and a random job leaves, untimed, to keep the number. Times are of
this thread's CPU: what the machine does beside it is not the policy's.
"""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.coscheduling.optimum import draw_jobs
from benchmarks.options import BenchOptions
from slackwater.model.ids import JobId
from slackwater.model.job import JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.model.placement import Refusal
from slackwater.policy.placement.catalogue import make_policy
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.interface import JobProgress, PlacementPolicy

POLICIES = ("ours", "group", "horizon")
CONCURRENT = (100, 500, 1000, 2000)


def run(options: BenchOptions) -> dict[str, float]:
    """`p50_ms_<jobs>` and `p99_ms_<jobs>` of ours, `<policy>.p50_ms_<jobs>` of the others, and
    their growth.
    """
    timed = 40 if options.quick else 200
    found: dict[str, float] = {}
    for number, policy in enumerate(POLICIES):
        prefix = "" if policy == "ours" else f"{policy}."
        for concurrent in CONCURRENT:
            options.progress(f"{policy}, {concurrent} jobs", number / len(POLICIES))
            arrivals_ms = _arrivals_ms(policy, concurrent, timed, options.seed)
            for share in (50, 99):
                key = f"{prefix}p{share}_ms_{concurrent}"
                found[key] = float(np.percentile(arrivals_ms, share))
        for share in (50, 99):
            before, after = found[f"{prefix}p{share}_ms_500"], found[f"{prefix}p{share}_ms_2000"]
            found[f"{prefix}growth_500_to_2000_p{share}"] = after / before
        found[f"{prefix}growth_500_to_2000"] = found[f"{prefix}growth_500_to_2000_p99"]
    return found


def _arrivals_ms(name: str, concurrent: int, timed: int, seed: int) -> list[float]:
    fleet = FleetView(Pool(Role.ROLLOUT, H20, 8192), Pool(Role.TRAIN, H800, 8192))
    policy = make_policy(name, fleet, seed=seed)
    generator = np.random.default_rng([seed, concurrent])
    jobs = [
        JobSpec(JobId(f"job-{i}"), 0.0, job.iterations, job.slo, job.profile)
        for i, job in enumerate(draw_jobs(generator, concurrent + timed))
    ]
    for job in jobs[:concurrent]:
        assert not isinstance(policy.place(job, 0.0), Refusal)
    placed = list(jobs[:concurrent])
    times_ms = []
    for job in jobs[concurrent:]:
        leaver = placed.pop(int(generator.integers(len(placed))))
        policy.remove(leaver.job, 0.0)
        standings = _standings(placed, generator)
        began_s = time.thread_time()
        _arrive(policy, job, standings)
        times_ms.append(1e3 * (time.thread_time() - began_s))
        placed.append(job)
    return times_ms


def _standings(placed: Sequence[JobSpec], generator: np.random.Generator) -> list[JobProgress]:
    """Every job somewhere in its life, as far as its bound asks for."""
    done = generator.uniform(0, 0.9, len(placed))
    standings = []
    for job, share in zip(placed, done, strict=True):
        left = max(int(job.iterations * (1 - share)), 1)
        standings.append(JobProgress(job.job, left, job.slo * left * job.profile.solo_s))
    return standings


def _arrive(policy: PlacementPolicy, job: JobSpec, standings: Sequence[JobProgress]) -> None:
    policy.observe(standings)
    policy.place(job, 0.0)
    policy.rebalance(0.0)
