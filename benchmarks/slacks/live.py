"""The demo of five kinds of slack, live on this machine, beside a simulation of it.

The simulation gets what the jobs took alone, from the record of the same run: engines' steps, pulls
and loans, actions, updates and what lies between them, and the processor time that each role used
meanwhile. It also gets how many iterations had anything to train on, how long the spot engine took
to start, and how much slower a probe found the processors than while the jobs ran alone: a host
gives a virtual machine whole cores or hardware threads. It predicts when both jobs have ended
together, what that costs, the served model's attainment, and where tokens are sampled.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.options import BenchOptions
from benchmarks.slacks.demo_fleet import DemoFleet, DemoRunReport
from benchmarks.slacks.demo_processors import ProcessorLog, ProcessorLooks
from benchmarks.slacks.demo_record import measures_of
from slackwater.model.errors import RefusedError

JOBS = Path(__file__).parents[2] / "examples" / "five_slacks" / "jobs"
_PROCESSORS = "processors.json"  # beside the run, in the folder of a record
_ALONE = "8"  # iterations: processor time is read twice a second
_TOGETHER = "30"  # so that a second more or less of the spot engine counts for little
_WITHIN_S = 1500.0
_DEVICE_PER_H, _SPOT_PER_H = 2.0, 0.7  # as in the demo's service


def live_figures(options: BenchOptions) -> dict[str, float]:
    """Run the demo, then predict it; or predict again the run that `options.record` holds."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.record or Path(temporary)
        if not (folder / _PROCESSORS).exists():
            options.progress("live", 0.0)
            _run_demo(folder)
        looks = ProcessorLooks.read(folder / _PROCESSORS)
        measures = measures_of(folder / "run" / "events", looks)
        result: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
        began_s = measures.together_s
        slower = measures.speed / looks.speed([(began_s, began_s + result["took_s"])])
    served = result["served"]
    return {
        "kinds_seen": float(result["kinds_seen"]),
        "live_s": result["took_s"],
        "live_alone_s": result["alone_s"],
        "live_requests": float(served["requests"]),
        "live_different_answers": float(served["different_answers"] + served["failed"]),
        "live_jobs_with_other_rewards": float(
            sum(not row["same_rewards"] for row in result["jobs"])
        ),
        **{f"live_{row['kind']}_saved": float(row["saved"]) for row in result["slack"]},
        "processors_slower_together": slower,
        **compared(result, DemoFleet(result, measures.scaled(slower)).report()),
    }


def _run_demo(folder: Path) -> None:
    command = [sys.executable, "-m", "slackwater", "demo", str(JOBS), "--slacks", "--json"]
    command += ["--alone", _ALONE, "--iterations", _TOGETHER]
    command += ["--run", f"{folder}/run", "--models", f"{folder}/models"]
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, stdout=null, stderr=pipe, text=True) as demo:
        log = ProcessorLog(demo)
        try:
            _, errors = demo.communicate(timeout=_WITHIN_S)
        finally:
            demo.kill()
    if demo.returncode:
        raise RefusedError(f"the demo failed: {errors[-500:]}")
    log.looks.write(folder / _PROCESSORS)


def compared(result: Mapping[str, Any], predicted: DemoRunReport) -> dict[str, float]:
    """Completion, cost, attainment and tokens by source: predicted over live, the least and the
    most of them too.
    """
    pairs = {
        "completed_s": (predicted.completed_s, result["took_s"]),
        "cost": (
            _cost(predicted.completed_s, predicted.spot_s),
            _cost(result["took_s"], result["instance"].get("lived_s", 0.0)),
        ),
        "attainment": (predicted.attainment, result["served"]["attainment"]),
    }
    made = sum(result["tokens"].values())
    simulated = max(sum(predicted.tokens.values()), 1)
    for kind in sorted(result["tokens"].keys() | predicted.tokens.keys()):
        share = predicted.tokens.get(kind, 0) / simulated
        pairs[f"{kind}_tokens"] = (share * made, result["tokens"].get(kind, 0))
    # a source that neither has is foreseen; one that only the simulation has is far off
    ratios = {
        name: 1.0 if one == live else one / (live or 1e-9) for name, (one, live) in pairs.items()
    }
    return {
        **{f"live_{name}": float(live) for name, (_, live) in pairs.items()},
        **{f"{name}_predicted_over_live": ratio for name, ratio in ratios.items()},
        "predicted_over_live_min": min(ratios.values()),
        "predicted_over_live_max": max(ratios.values()),
    }


def _cost(completed_s: float, spot_s: float) -> float:
    """Two devices while the jobs run, and the spot engine while it is there."""
    return (2 * completed_s * _DEVICE_PER_H + spot_s * _SPOT_PER_H) / 3600
