"""Two TRL GRPO jobs that share one processor for generation and one for training, under permits:
together against one after the other.

Each job is a process with TRL's own GRPOTrainer, subclassed (`trl_job.py`); the service gives
permits and does nothing else. Alone a job runs without the service, and what its phases took is its
profile. `together_over_alone` is the time of both jobs one after the other over the time of both
together; the curves must be those of the jobs alone, to the bit.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.options import BenchOptions
from slackwater.cli.own_service import own_service
from slackwater.model.errors import RefusedError
from slackwater.zoo.tiny import make_model

_LIMIT_S = 1800.0


def run(options: BenchOptions) -> dict[str, object]:
    if importlib.util.find_spec("trl") is None:
        raise RefusedError("trl_coexec: needs the peers extra; pip install 'slackwater[peers]'")
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise RefusedError("trl_coexec: needs two processors, one to generate and one to train")
    shape = {"prompts": 24, "group": 8, "prompt_tokens": 16, "new_tokens": 64}
    job = {
        "shape": shape,
        "steps": 4 if options.quick else 12,
        "slo": 2.0,
        "rollout_cores": [cores[0]],
        "train_cores": [cores[1]],
    }
    seeds = {"a": options.seed, "b": options.seed + 1}
    with (
        tempfile.TemporaryDirectory(prefix="slackwater-trl-") as folder,
        _service(Path(folder)) as where,
    ):
        alone: dict[str, dict[str, Any]] = {}
        for number, (name, seed) in enumerate(seeds.items()):
            options.progress(f"{name} alone", number * 0.3)
            alone |= _jobs({name: job | {"name": name, "seed": seed}}, {"SLACKWATER_OFFLINE": "1"})
        options.progress("together", 0.6)
        both = {
            name: job | {"name": name, "seed": seed, "profile": _profile(alone[name])}
            for name, seed in seeds.items()
        }
        together = _jobs(both, where)
    return _figures(alone, together)


def _figures(alone: dict[str, Any], together: dict[str, Any]) -> dict[str, object]:
    alone_s = {name: _seconds([found]) for name, found in alone.items()}
    together_s = _seconds(list(together.values()))
    same = ("rewards", "weights_sum", "weights_norm")
    shares = [f["phases_s"]["rollout"] / sum(f["phases_s"].values()) for f in alone.values()]
    return {
        "alone_s": alone_s,
        "together_s": together_s,
        "together_over_alone": sum(alone_s.values()) / together_s,
        "slowdown": {n: _seconds([f]) / alone_s[n] for n, f in together.items()},
        "rollout_share_alone": statistics.mean(shares),
        "curves_as_alone": all(
            together[name][key] == alone[name][key] for name in alone for key in same
        ),
        "last_rewards": {name: found["rewards"][-1] for name, found in together.items()},
        "steps": len(together["a"]["rewards"]),
    }


def _profile(alone: dict[str, Any]) -> dict[str, float]:
    """What an iteration took alone: the job comes with a known profile, and is not profiled
    again.
    """
    steps = len(alone["rewards"])
    spent = alone["phases_s"]
    return {"rollout_s": spent["rollout"] / steps, "train_s": spent["train"] / steps}


def _seconds(found: Sequence[dict[str, Any]]) -> float:
    """From the first step's begin to the last step's end, of all of them."""
    return float(max(f["ended_s"] for f in found) - min(f["began_s"] for f in found))


@contextmanager
def _service(folder: Path) -> Iterator[dict[str, str]]:
    """A service whose co-scheduler has one rollout and one train node."""
    tiny = folder / "tiny"
    make_model("tiny", tiny, 0)
    settings = ("--set", "coschedule.placement=ours")
    with own_service(folder / "service", "tiny", tiny, *settings) as (url, key):
        yield {"SLACKWATER_URL": url, "SLACKWATER_KEY": key}


def _jobs(asked: dict[str, dict[str, Any]], where: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Run the jobs at once, begun together; what each found."""
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | os.environ | where
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.state.trl_job", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if os.environ.get("SLACKWATER_BENCH_VERBOSE") else subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        for name, job in asked.items()
    }
    try:
        for name, process in processes.items():
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise RefusedError(
                    f"trl_coexec: job {name} did not start; SLACKWATER_BENCH_VERBOSE=1 shows why"
                )
        found = {}
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for name, process in processes.items():
            output, _ = process.communicate(timeout=_LIMIT_S)
            found[name] = json.loads(output.strip().splitlines()[-1])
        return found
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
