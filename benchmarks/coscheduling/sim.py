"""`slackwater bench sim`: how fast two weeks of 200 jobs are simulated by the controllers that run
live.
"""

import time
from dataclasses import replace

from benchmarks.coscheduling.cluster import production
from benchmarks.options import BenchOptions
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.workload import ProductionWorkload


def run(options: BenchOptions) -> dict[str, float]:
    """Wall time of whole runs: drawing jobs and lengths, placement, every phase, invariants."""
    scenario = production(options.seed, options.quick)
    found: dict[str, float] = {}
    policies = ("group", "ours")
    for number, policy in enumerate(policies):
        options.progress(policy, number / len(policies))
        chosen = replace(scenario, policy=replace(scenario.policy, name=policy))
        small = replace(chosen, workload=ProductionWorkload(jobs=5))
        simulate(small)  # Compiled parts are loaded before the clock starts.
        began_s = time.perf_counter()
        cpu_s = time.process_time()
        report = simulate(chosen)
        wall_s = time.perf_counter() - began_s
        cpu_s = time.process_time() - cpu_s
        found[f"{policy}.two_week_wall_s"] = wall_s
        found[f"{policy}.two_week_cpu_s"] = cpu_s
        found[f"{policy}.events"] = report.events
        found[f"{policy}.events_per_s"] = report.events / wall_s
        found[f"{policy}.simulated_over_wall"] = report.end_s / wall_s
    found["events_per_s"] = found["ours.events_per_s"]
    found["two_week_wall_s"] = found["ours.two_week_wall_s"]
    return found
