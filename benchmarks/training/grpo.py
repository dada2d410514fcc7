"""`slackwater bench grpo`: trained tokens per CPU-second of a GRPO step, ours over TRL's, in the
same run.

All of our CPU time counts: engine, trainer, and the driver between them. The two take turns, so
that a busy machine hurts both alike; each figure is the median of its turns.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.options import BenchOptions
from benchmarks.training.grpo_step import StepShape, measure
from slackwater.model.errors import RefusedError, UnavailableError

WARM_UP = 5


def run(options: BenchOptions) -> dict[str, float | str]:
    """Take turns and compare."""
    if importlib.util.find_spec("trl") is None:
        raise RefusedError("trl: is not installed; pip install -c constraints.txt '.[peers]'")
    shape = StepShape()
    turns, steps = (1, 8) if options.quick else (3, 30)
    ours: list[float] = []
    theirs: list[float] = []
    rewards: list[float] = []
    for turn in range(turns):
        options.progress("ours", turn / turns)
        cpu_s, rewards = measure(shape, steps, WARM_UP, options.seed + turn)
        ours.append(shape.completion_tokens / cpu_s)
        options.progress("TRL", (turn + 0.4) / turns)
        peer = _peer(shape, steps, options.seed + turn)
        theirs.append(shape.completion_tokens / peer["cpu_s_per_step"])
    return {
        "over_trl": statistics.median(ours) / statistics.median(theirs),
        "tokens_per_cpu_s": statistics.median(ours),
        "trl_tokens_per_cpu_s": statistics.median(theirs),
        "reward_first5": statistics.mean(rewards[:5]),
        "reward_last5": statistics.mean(rewards[-5:]),
        "trl_reward_first5": statistics.mean(peer["rewards"][:5]),
        "trl_reward_last5": statistics.mean(peer["rewards"][-5:]),
        "steps": float(steps),
        "turns": float(turns),
        "completion_tokens_per_step": float(shape.completion_tokens),
        "trl_version": peer["trl"],
        "transformers_version": peer["transformers"],
    }


def _peer(shape: StepShape, steps: int, seed: int) -> dict[str, Any]:
    given = {"shape": asdict(shape), "steps": steps, "warm_up": WARM_UP, "seed": seed}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training.grpo_peer", json.dumps(given)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise UnavailableError(f"TRL's run failed: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
