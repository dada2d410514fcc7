"""What the joint simulator says of jobs together, from what was measured of each alone.

Its inputs are lengths of phases and hand-overs, the processor time that control plane and driver
used beside them, and how much the two cores slow each other; all of them from runs in which no two
jobs met. The co-scheduler is the service's own.
"""

from collections.abc import Sequence
from statistics import mean

from benchmarks.coscheduling.coexec_shop import Run
from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import NodeType, Pool, Role
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.fleet.costs import FleetCosts, MachineShare
from slackwater.sim.fleet.job import TurnPlan
from slackwater.sim.fleet.simulate import simulate_jointly

_ITERATIONS = 60
_TINY = 1e-4


def predicted_throughput(
    alone: Sequence[Run], settings: CoscheduleSettings, slo: float, both_slow: float
) -> float:
    """Of the jobs together over each alone in turn."""
    times = [run.times for run in alone]
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
    costs = FleetCosts(
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
