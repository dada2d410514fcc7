"""What the joint simulator says of jobs together, from what was measured of each alone.

Its inputs are lengths of phases and hand-overs, the processor time that control plane and driver used beside them, and how much the two
cores slow each other; all of them from runs in which no two jobs met. The co-scheduler is the service's own.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from statistics import mean

from slackwater.bench.coscheduling.coexec_shop import Run
from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import NodeType, Pool, Role
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.joint.costs import JointCosts, MachineShare
from slackwater.sim.joint.job_run import TurnPlan
from slackwater.sim.joint.simulate import simulate_jointly

_ITERATIONS = 60
_TINY = 1e-4


def predicted_throughput(
    alone: Sequence[Run], settings: CoscheduleSettings, slo: float, both_slow: float
) -> float:
    """Of the jobs together over each alone in turn."""
    times = [next(iter(run.account.jobs.values())) for run in alone]
    specs = tuple(
        JobSpec(
            *(JobId(f"j{number}"), 0.0, _ITERATIONS, slo),
            JobProfile(one.rollout_s, one.train_s, one.sync_s, 1, 1, 0.0, 0.0, 0.001),
        )
        for number, one in enumerate(times)
    )
    cycles_s = [one.rollout_s + one.train_s + one.sync_s + one.handover_s for one in times]
    # Control plane and driver use as much for an iteration as they did alone, whenever they run.
    loads = [
        run.beside * cycle_s / (one.rollout_s + one.train_s)
        for run, one, cycle_s in zip(alone, times, cycles_s, strict=True)
    ]
    load = mean(loads)
    costs = JointCosts(
        *(_TINY, 0.0, _TINY, _TINY),
        handover_s=mean(one.handover_s for one in times),
        share=MachineShare(2, load, load, both_slow),
    )
    kind = NodeType("node", 8, 1.0, 64.0, 1.0, 1.0, 1.0)
    scenario = ClusterScenario(
        fleet=(Pool(Role.ROLLOUT, kind, 1), Pool(Role.TRAIN, kind, 1)),
        jobs=specs,
        policy=PolicyConfig(name=settings.placement),
    )
    report = simulate_jointly(
        scenario,
        plan=TurnPlan(turns=4, max_tokens=24, median_share=1.0, sigma=0.0),
        costs=costs,
        scheduler=settings.new_coscheduler(1, 1),
    )
    return sum(_ITERATIONS * cycle_s for cycle_s in cycles_s) / report.end_s


_WORK = """
import os, sys, time, torch
torch.set_num_threads(1)
os.sched_setaffinity(0, {int(sys.argv[1])})
few, many = torch.randn(8, 512), torch.randn(512, 512)
weights = [torch.randn(512, 1536) for _ in range(8)]
rows = few if sys.argv[2] == "rollout" else many
def once():
    for weight in weights:
        rows @ weight
for _ in range(20):
    once()
print("ready", flush=True)
sys.stdin.readline()
until_s, done = time.perf_counter() + float(sys.argv[3]), 0
while time.perf_counter() < until_s:
    once()
    done += 1
print(done, flush=True)
"""


def both_cores_slow(cores: tuple[int, int], seconds: float) -> float:
    """How much longer products of a rollout's and of a training's size take side by side than one at a time: the machine's own share."""
    works = tuple(zip(cores, ("rollout", "train"), strict=True))
    apart = [_rates([work], seconds)[0] for work in works]
    together = _rates(works, seconds)
    return mean(a / b for a, b in zip(apart, together, strict=True))


def _rates(works: Sequence[tuple[int, str]], seconds: float) -> list[float]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _WORK, str(core), kind, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for core, kind in works
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        return [float(process.communicate(timeout=60 + seconds)[0]) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
