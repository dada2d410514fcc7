"""The demo of five kinds of slack, live on this machine, beside a simulation of its two jobs.

The simulation gets what each job's phases took alone; it predicts when both have ended together.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.options import BenchOptions
from slackwater.model.errors import RefusedError
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.fleet.costs import FleetCosts
from slackwater.sim.fleet.job import TurnPlan
from slackwater.sim.fleet.simulate import simulate_jointly

JOBS = Path(__file__).parents[2] / "examples" / "five_slacks" / "jobs"
_WITHIN_S = 1500.0
_SWITCH_S = 0.05


def live_figures(options: BenchOptions) -> dict[str, float]:
    """Run the demo, then predict it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "slackwater", "demo", str(JOBS), "--slacks", "--json"]
        command += ["--alone", "3", "--run", f"{folder}/run", "--models", f"{folder}/models"]
        options.progress("live", 0.0)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_WITHIN_S, check=False
        )
    if done.returncode:
        raise RefusedError(f"the demo failed: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    served, took_s, predicted_s = result["served"], result["took_s"], _predicted_s(result)
    return {
        "live_kinds_seen": float(result["kinds_seen"]),
        "live_s": took_s,
        "live_alone_s": result["alone_s"],
        "predicted_s": predicted_s,
        "predicted_over_live": predicted_s / took_s,
        "live_requests": float(served["requests"]),
        "live_attainment": served["attainment"],
        "live_different_answers": float(served["different_answers"] + served["failed"]),
        "live_jobs_with_other_rewards": float(
            sum(not row["same_rewards"] for row in result["jobs"])
        ),
        **{f"live_{row['kind']}_saved": float(row["saved"]) for row in result["slack"]},
    }


def _predicted_s(result: dict[str, Any]) -> float:
    """From the first job's first iteration to the end of both, as the demo counts."""
    specs = tuple(
        JobSpec(
            JobId(row["job"]),
            0.0,
            row["iterations"] - 1,
            row["bound"],
            JobProfile(**row["profile"], rollout_state_gb=1.0, train_state_gb=1.0),
        )
        for row in result["jobs"]
    )
    pools = (Pool(Role.ROLLOUT, H20, 1), Pool(Role.TRAIN, H800, 1))
    scenario = ClusterScenario(fleet=pools, jobs=specs, policy=PolicyConfig(name="group"))
    costs = FleetCosts(load_s=_SWITCH_S, switch_s=_SWITCH_S, pull_s=_SWITCH_S, start_s=_SWITCH_S)
    whole = TurnPlan(turns=16, median_share=1.0, sigma=0.0)  # a rollout takes what it took alone
    return simulate_jointly(scenario, plan=whole, costs=costs).end_s
