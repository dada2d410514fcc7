"""One controller, two bodies: do they agree?

First, live steps (undisturbed, and with an engine killed at a third of the step) are recorded and
their record is replayed through a fresh manager: it must give the same commands. Second, the
engines' costs are learned from the record of other steps (other lengths, run in between), the same
steps are simulated by the same manager with those costs, and the simulated step time is compared
with the live one.

Two engines and the control plane share this machine's cores, which engines with devices of their
own do not; so steps are padded, as in `bench migrate`. The same without padding is measured beside
it (`unpadded_...`).
"""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.engine.profile import Profile, fit, steps_of
from benchmarks.options import BenchOptions
from benchmarks.rollout.migrate import LEAST_STEP_MS, StepPlan
from benchmarks.rollout.one_step import simulate_step
from harness.live_fleet import FleetPlan, LiveFleet
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import EVENT_TYPES
from slackwater.control.record import replay
from slackwater.control.rollout.settings import RolloutSettings

_DEADLINE_S = 900.0
_INSTANCES = 2
_MAX_RUNNING = 128
_SETTINGS = RolloutSettings(max_losses_without_progress=50)


def run(options: BenchOptions) -> dict[str, float]:
    """How far the simulator is from the live steps, and whether the replay agrees."""
    from slackwater.zoo.tiny import make_model

    step = StepPlan(options.seed, turns=48 if options.quick else 96)
    with tempfile.TemporaryDirectory(prefix="slackwater-agreement-") as folder:
        model = Path(folder) / "model"
        make_model("small", model, seed=options.seed)
        plain = FleetPlan(model, Path(folder), max_running=_MAX_RUNNING)
        padded = replace(plain, least_step_ms=LEAST_STEP_MS)
        figures = asyncio.run(_bounded(padded, step, options))
        beside = asyncio.run(_bounded(plain, step, options))
    return figures | {f"unpadded_{key}": value for key, value in beside.items()}


async def _bounded(plan: FleetPlan, step: StepPlan, options: BenchOptions) -> dict[str, float]:
    async with asyncio.timeout(_DEADLINE_S):
        return await _measure(plan, step, options)


async def _measure(plan: FleetPlan, step: StepPlan, options: BenchOptions) -> dict[str, float]:
    lines: list[bytes] = []
    other: list[bytes] = []
    rounds = 1 if options.quick else 3
    calm: list[float] = []
    hit: list[float] = []
    async with LiveFleet(plan, _SETTINGS, lines.append) as fleet:
        for place in range(rounds):
            options.progress("live steps", place / rounds)
            await _warm(fleet, step, place)
            other += await _profiled(fleet, step, lines, 2 * place)
            calm.append(await _live(fleet, step, f"calm-{place}", None))
            other += await _profiled(fleet, step, lines, 2 * place + 1)
            hit.append(await _live(fleet, step, f"hit-{place}", float(np.median(calm)) / 3))
        kv_tokens = fleet.ready()[0].spec.kv_tokens
    agreed, divergence = replay(FleetController(_SETTINGS), lines, EVENT_TYPES)
    live_s, live_kill_s = float(np.median(calm)), float(np.median(hit))
    profile = fit(steps_of(other), kv_tokens)
    cost = profile.cost
    simulated_s = _simulated(step, profile, None)
    simulated_kill_s = _simulated(step, profile, live_s / 3)
    errors = (abs(simulated_s / live_s - 1), abs(simulated_kill_s / live_kill_s - 1))
    return {
        "worst_error": max(errors),
        "step_error": errors[0],
        "kill_error": errors[1],
        "live_step_s": live_s,
        "simulated_step_s": simulated_s,
        "live_kill_step_s": live_kill_s,
        "simulated_kill_step_s": simulated_kill_s,
        "replayed_events": float(agreed),
        "replay_divergences": float(divergence is not None),
        **{f"step_ms_{size}": 1e3 * step_s for size, step_s in cost.steps},
        "context_ns_per_token": 1e9 * cost.context_s,
        "prefill_us_per_token": 1e6 * cost.prefill_token_s,
        "alone_slowdown": profile.alone_slowdown,
    }


async def _profiled(
    fleet: LiveFleet, step: StepPlan, lines: list[bytes], place: int
) -> list[bytes]:
    """The record of one step of other lengths."""
    before = len(lines)
    await _live(fleet, replace(step, seed=step.seed + 1000 + place), f"profile-{place}", None)
    return lines[before:]


async def _warm(fleet: LiveFleet, step: StepPlan, place: int) -> None:
    fleet.provider.start(_INSTANCES - len(fleet.provider.instances()))
    await fleet.until_ready(_INSTANCES)
    warming = StepPlan(step.seed, turns=32, median_tokens=20.0, sigma=0.3)
    await fleet.generate(warming.specs(f"warm-{place}"))


async def _live(fleet: LiveFleet, step: StepPlan, label: str, kill_s: float | None) -> float:
    loop = asyncio.get_running_loop()
    specs = step.specs(label)
    began_s = loop.time()
    if kill_s is not None:
        victim = fleet.ready()[0].spec.instance
        loop.call_later(kill_s, fleet.provider.kill, victim)
    await fleet.generate(specs)
    return loop.time() - began_s


def _simulated(step: StepPlan, profile: Profile, kill_s: float | None) -> float:
    names = [f"engine-{number}" for number in range(_INSTANCES)]
    return simulate_step(
        step.specs("simulated"),
        profile.cost,
        names,
        max_running=_MAX_RUNNING,
        settings=_SETTINGS,
        kill=None if kill_s is None else (kill_s, names[0]),
        alone_slowdown=profile.alone_slowdown,
    )
