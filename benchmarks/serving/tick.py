"""How long one decision takes: who has the device next, with a full queue and a full batch.

Wall time on a machine that does other work counts that work too, so the CPU time of the same ticks
stands beside it.
"""

from time import perf_counter, thread_time

import numpy as np

from benchmarks.options import BenchOptions
from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.admission import RolloutGrant
from slackwater.policy.serving.arbiter import Arbiter
from slackwater.policy.serving.modes import MODES
from slackwater.policy.serving.slack import QueuedPrompt, RolloutState, ServingState
from slackwater.policy.serving.step_cost import StepCost, StepWork

_COST = StepCost.of((1, 64, 512, 4096), (0.008, 0.009, 0.02, 0.16), 1e-8, 1e-9)


def run(options: BenchOptions) -> dict[str, float]:
    """p50 and p99 by mode, in microseconds; each tick also learns from a step and an arrival."""
    ticks = 2000 if options.quick else 20_000
    figures: dict[str, float] = {}
    for number, mode in enumerate(MODES.values()):
        options.progress(mode.name, number / len(MODES))
        wall, cpu = _ticks(mode.name, ticks, options.seed)
        figures[f"{mode.name}_p50_us"] = 1e6 * float(np.quantile(wall, 0.5))
        figures[f"{mode.name}_p99_us"] = 1e6 * float(np.quantile(wall, 0.99))
        figures[f"{mode.name}_cpu_p99_us"] = 1e6 * float(np.quantile(cpu, 0.99))
    figures["p99_us"] = figures["foresight_p99_us"]
    figures["cpu_p99_us"] = figures["foresight_cpu_p99_us"]
    return figures


def _ticks(mode: str, ticks: int, seed: int) -> tuple[list[float], list[float]]:
    rng = np.random.default_rng(seed)
    arbiter = Arbiter(MODES[mode], ServingSlo(0.5, 0.15), _COST, _COST, capacity=40_000)
    arbiter.begin_loan()
    arbiter.begin_step(2000)
    wall: list[float] = []
    cpu: list[float] = []
    now_s = 0.0
    for _ in range(ticks):
        now_s += float(rng.exponential(0.02))
        queued = [
            QueuedPrompt(now_s - age_s, tokens)
            for age_s, tokens in zip(
                rng.uniform(0, 0.3, int(rng.integers(0, 33))).tolist(),
                rng.integers(10, 4000, 33).tolist(),
                strict=False,
            )
            if rng.random() < 0.7
        ]
        if rng.random() < 0.5:
            queued = []
        decoding = int(rng.integers(0, 256))
        age_s = float(rng.uniform(0, 0.05))
        serving = ServingState(queued, decoding, decoding * 1500, now_s - age_s, now_s + 0.1)
        rollout = RolloutState(16, 160_000, int(rng.integers(0, 8000)), 4000)
        began_s, began_cpu_s = perf_counter(), thread_time()
        arbiter.record_arrival(now_s, 1200)
        step = arbiter.next_step(now_s, serving, rollout)
        arbiter.record_memory_use(2000)
        if isinstance(step, RolloutGrant):
            arbiter.record_rollout_step(StepWork(16 + step.prompt_tokens, 160_000.0), step.step_s)
        else:
            arbiter.record_service_step(StepWork(decoding, decoding * 1500.0), 0.01)
        cpu.append(thread_time() - began_cpu_s)
        wall.append(perf_counter() - began_s)
    return wall, cpu
