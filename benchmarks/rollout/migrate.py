"""What a kill in mid-step costs: turns that go on from their tokens, against turns that start over.

A step is one batch of turns with long-tailed lengths on two real engine processes. One of them is
killed with SIGKILL at a third or at two thirds of the undisturbed step time, and is not replaced
before the step ends. The overhead is the step time beyond the undisturbed one. Both ways use the
same manager, engines, seeds and victims; in the baseline the turns of a lost instance lose their
tokens first (RLBoost 6.4 compares the same two).

Engines here share the cores of one machine, so the one that is left would gain the cores of the one
that died; instances on accelerators of their own gain nothing. Therefore no engine step is shorter
than 25 ms, which leaves the cores idle part of the time, and makes a step's time as flat in the
batch as that of an accelerator bound by memory. The same steps without that padding are measured
beside them (`unpadded_...`).
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.options import BenchOptions
from harness.live_fleet import BASE, BASE_VERSION, JOB, FleetPlan, LiveFleet
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.rollout.events import InstanceLost
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.ids import TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec

_DEADLINE_S = 1500.0
_INSTANCES = 2
LEAST_STEP_MS = 25.0


class StartingOver:
    """The baseline: a manager to which a lost instance's unfinished turns are as good as new."""

    def __init__(self, controller: FleetController) -> None:
        self._controller = controller

    def handle(self, event: FleetEvent) -> Sequence[FleetCommand]:
        record = None
        if isinstance(event, InstanceLost):
            record = self._controller.rollout.state.instances.records.get(event.instance)
        for turn in record.attempts.values() if record is not None else ():
            turn.base_tokens = 0
            turn.roll_back()
        return self._controller.handle(event)

    def check_integrity(self) -> None:
        self._controller.check_integrity()


@dataclass(frozen=True, slots=True)
class Kill:
    """How long into the step which engine dies."""

    after_s: float
    victim: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's turns: long-tailed lengths, the same in every run of the seed."""

    seed: int
    turns: int = 96
    median_tokens: float = 70.0
    sigma: float = 0.7
    longest_tokens: int = 400

    def specs(self, label: str) -> list[TurnSpec]:
        """The turns, under names of their own."""
        rng = np.random.default_rng(self.seed)
        drawn = rng.lognormal(np.log(self.median_tokens), self.sigma, self.turns)
        lengths = np.clip(drawn, 8, self.longest_tokens).astype(int).tolist()
        return [
            TurnSpec(
                turn=TurnId(f"{label}/{number}"),
                trajectory=TrajectoryId(f"{label}/{number}"),
                job=JOB,
                base_model=BASE,
                prompt=tuple(rng.integers(10, 250, 24).tolist()),
                sampling=Sampling(max_tokens=length, seed=number),
                version=BASE_VERSION,
            )
            for number, length in enumerate(lengths)
        ]


def run(options: BenchOptions) -> dict[str, float]:
    """Overheads of early and late kills, both ways."""
    from slackwater.zoo.tiny import make_model

    step = StepPlan(options.seed, turns=48 if options.quick else 96)
    rounds = 1 if options.quick else 2
    with tempfile.TemporaryDirectory(prefix="slackwater-migrate-") as folder:
        model = Path(folder) / "model"
        make_model("small", model, seed=options.seed)
        plain = FleetPlan(model, Path(folder), max_running=128)
        padded = replace(plain, least_step_ms=LEAST_STEP_MS)
        figures = asyncio.run(_bounded(padded, step, rounds, options))
        beside = asyncio.run(_bounded(plain, step, rounds, options))
    return figures | {f"unpadded_{key}": value for key, value in beside.items()}


async def _bounded(
    plan: FleetPlan, step: StepPlan, rounds: int, options: BenchOptions
) -> dict[str, float]:
    async with asyncio.timeout(_DEADLINE_S):
        return await _measure(plan, step, rounds, options)


async def _measure(
    plan: FleetPlan, step: StepPlan, rounds: int, options: BenchOptions
) -> dict[str, float]:
    moved, again = _Steps(plan, step), _Steps(plan, step, start_over=True)
    async with moved, again:
        overheads: dict[str, list[float]] = {}
        calm: list[float] = []
        for place in range(rounds * _INSTANCES):
            what = "padded steps" if plan.least_step_ms else "steps as they are"
            options.progress(what, place / (rounds * _INSTANCES))
            calm.append(await moved.time(None))
            base_s = float(np.median(calm))
            for name, share in (("early", 1 / 3), ("late", 2 / 3)):
                kill = Kill(share * base_s, place % _INSTANCES)
                for way, steps in (("migrate", moved), ("recompute", again)):
                    took_s = await steps.time(kill)
                    overheads.setdefault(f"{name}_{way}", []).append(took_s)
    base_s = float(np.median(calm))
    figures = {
        f"{key}_overhead_s": float(np.mean(took)) - base_s for key, took in overheads.items()
    }
    return {
        "early_over_recompute": figures["early_migrate_overhead_s"]
        / figures["early_recompute_overhead_s"],
        "late_over_recompute": figures["late_migrate_overhead_s"]
        / figures["late_recompute_overhead_s"],
        "step_s": base_s,
        **figures,
        "kills": float(sum(len(took) for took in overheads.values())),
        "turns": float(step.turns),
    }


class _Steps:
    """A fleet on which steps are run one after the other; a killed engine is replaced
    between them.
    """

    def __init__(self, plan: FleetPlan, step: StepPlan, *, start_over: bool = False) -> None:
        before = StartingOver if start_over else None
        self._fleet = LiveFleet(
            plan, RolloutSettings(max_losses_without_progress=50), before=before
        )
        self._step = step
        self._count = 0

    async def __aenter__(self) -> None:
        await self._fleet.__aenter__()

    async def __aexit__(self, *exit_info: object) -> None:
        await self._fleet.__aexit__(None, None, None)

    async def time(self, kill: Kill | None) -> float:
        """One step, from its first turn sent to its last turn whole."""
        loop = asyncio.get_running_loop()
        await self._warm()
        self._count += 1
        specs = self._step.specs(f"step-{self._count}")
        began_s = loop.time()
        if kill is not None:
            victim = self._fleet.ready()[kill.victim].spec.instance
            timer = loop.call_later(kill.after_s, self._fleet.provider.kill, victim)
        results = await self._fleet.generate(specs)
        took_s = loop.time() - began_s
        if kill is not None:
            timer.cancel()
        wanted = [spec.sampling.max_tokens for spec in specs]
        assert [len(result.tokens) for result in results] == wanted, "a turn has lost tokens"
        return took_s

    async def _warm(self) -> None:
        """Two engines up, with their code compiled and their pages touched."""
        self._fleet.provider.start(_INSTANCES - len(self._fleet.provider.instances()))
        await self._fleet.until_ready(_INSTANCES)
        self._count += 1
        warming = StepPlan(self._step.seed, turns=32, median_tokens=20.0, sigma=0.3)
        await self._fleet.generate(warming.specs(f"warm-{self._count}"))
