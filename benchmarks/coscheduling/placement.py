"""`slackwater bench placement`: how long one arrival takes to place among so many concurrent jobs.

Jobs of Table 6's mix are placed until the fleet holds the number asked for; then every further
arrival is timed, with all that the co-scheduler asks a policy for it (how the placed jobs stand,
the placement, the rebalance), and so is the departure of a random job that keeps the number. Times
are of this thread's CPU: what the machine does beside it is not the policy's.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.cells import Figures, run_cells
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


@dataclass(frozen=True, slots=True)
class PlacementCell:
    """One policy that holds so many jobs."""

    policy: str
    concurrent: int
    timed: int
    seed: int

    def __str__(self) -> str:
        return f"{self.policy} {self.concurrent} jobs"


def run(options: BenchOptions) -> Figures:
    """`p50_ms_<jobs>` and `p99_ms_<jobs>` of ours (arrivals; `departure_` before them is of
    departures), `<policy>.p50_ms_<jobs>` of the others, and their growth.
    """
    timed = 40 if options.quick else 200
    cells = [
        PlacementCell(policy, concurrent, timed, options.seed)
        for concurrent in reversed(CONCURRENT)
        for policy in POLICIES
    ]
    # One at a time unless asked: neighbours share caches, which the times would show.
    measured = run_cells(options, "every policy", measure, cells, processes=1)
    found: Figures = {}
    for cell, figures in zip(cells, measured, strict=True):
        prefix = "" if cell.policy == "ours" else f"{cell.policy}."
        found |= {f"{prefix}{key}_{cell.concurrent}": value for key, value in figures.items()}
    for policy in POLICIES:
        prefix = "" if policy == "ours" else f"{policy}."
        for share in (50, 99):
            before, after = found[f"{prefix}p{share}_ms_500"], found[f"{prefix}p{share}_ms_2000"]
            found[f"{prefix}growth_500_to_2000_p{share}"] = after / before
        found[f"{prefix}growth_500_to_2000"] = found[f"{prefix}growth_500_to_2000_p99"]
    return found


def measure(cell: PlacementCell) -> Figures:
    """Fill a fleet, then time arrivals and departures."""
    fleet = FleetView(Pool(Role.ROLLOUT, H20, 8192), Pool(Role.TRAIN, H800, 8192))
    policy = make_policy(cell.policy, fleet, seed=cell.seed)
    generator = np.random.default_rng([cell.seed, cell.concurrent])
    jobs = [
        JobSpec(JobId(f"job-{i}"), 0.0, job.iterations, job.slo, job.profile)
        for i, job in enumerate(draw_jobs(generator, cell.concurrent + cell.timed))
    ]
    for job in jobs[: cell.concurrent]:
        assert not isinstance(policy.place(job, 0.0), Refusal)
    placed = list(jobs[: cell.concurrent])
    arrivals_ms, departures_ms = [], []
    # An hour apart: who was placed or moved lately is not looked at, which would take less time.
    for hour, job in enumerate(jobs[cell.concurrent :], 1):
        leaver = placed.pop(int(generator.integers(len(placed))))
        progress = _standings([*placed, leaver], generator)
        policy.observe(progress)
        began_s = time.thread_time()
        policy.remove(leaver.job)
        policy.rebalance(3600.0 * hour)
        left_s = time.thread_time()
        _arrive(policy, job, 3600.0 * hour, progress[:-1])
        departures_ms.append(1e3 * (left_s - began_s))
        arrivals_ms.append(1e3 * (time.thread_time() - left_s))
        placed.append(job)
    return {
        f"{prefix}p{share}_ms": float(np.percentile(times_ms, share))
        for prefix, times_ms in (("", arrivals_ms), ("departure_", departures_ms))
        for share in (50, 99)
    }


def _standings(placed: Sequence[JobSpec], generator: np.random.Generator) -> list[JobProgress]:
    """Every job somewhere in its life, as far as its bound asks for."""
    done = generator.uniform(0, 0.9, len(placed))
    progress = []
    for job, share in zip(placed, done, strict=True):
        left = max(int(job.iterations * (1 - share)), 1)
        progress.append(JobProgress(job.job, left, job.slo * left * job.profile.solo_s))
    return progress


def _arrive(
    policy: PlacementPolicy, job: JobSpec, now_s: float, progress: Sequence[JobProgress]
) -> None:
    policy.observe(progress)
    policy.place(job, now_s)
    policy.rebalance(now_s)
