"""One job on reserved training nodes and spot instances, for as long as a trace lasts (RLBoost
section 6).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.rollout.simulated.driven_engines import DrivenEngines
from benchmarks.rollout.simulated.provider import SpotProvider
from benchmarks.rollout.simulated.trainer import RolloutTrainer, StepReport, TrainingStepPlan
from benchmarks.rollout.simulated.trainer_cost import TrainerCost
from slackwater.control.fleet.controller import FleetController
from slackwater.control.rental import RentalTerms
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.ids import TurnId
from slackwater.model.spot_trace import SpotEvent
from slackwater.sim.core.queue import EventQueue
from slackwater.sim.inputs.traces import LengthDistribution
from slackwater.sim.rollout.engine_cost import (
    H100,
    QWEN3_8B,
    QWEN3_14B,
    QWEN3_32B,
    EngineCost,
    ModelShape,
)
from slackwater.sim.rollout.simulated_instances import InstanceSettings

# RLBoost Table 2.
RESERVED_NODE_PER_H = 83.79
SPOT_INSTANCE_PER_H = 5.32
_RESERVED_DEVICES = 8
_ENGINE_DEVICES = 2


@dataclass(frozen=True, slots=True)
class SpotSetup:
    """The training cluster, the model and the responses; prices and links of RLBoost Table 2.

    Every second spot instance takes `slowdown` times as long for everything. Spot instances may
    cost `spot_budget` dollars in all.
    """

    model: ModelShape
    training_nodes: int
    lengths: LengthDistribution
    plan: TrainingStepPlan = field(default_factory=TrainingStepPlan)
    max_running: int = 256
    slowdown: float = 1.0
    spot_budget: float = math.inf

    @property
    def engine(self) -> EngineCost:
        """Local and remote engines are alike: two H100 each."""
        return EngineCost(self.model, H100, _ENGINE_DEVICES)

    @property
    def trainer(self) -> TrainerCost:
        return TrainerCost(self.model, H100, _RESERVED_DEVICES * self.training_nodes)

    @property
    def local_engines(self) -> int:
        return self.training_nodes * _RESERVED_DEVICES // _ENGINE_DEVICES

    def draw_lengths(self, seed: int) -> Callable[[int], Sequence[int]]:
        """The hidden lengths of each step, the same whatever the policy."""

        def of_step(step: int) -> Sequence[int]:
            rng = np.random.default_rng((seed, step))
            drawn = self.lengths.draw(rng, self.plan.turns)
            whole: list[int] = np.clip(drawn, 1, self.plan.max_tokens).astype(int).tolist()
            return whole

        return of_step


SETUPS: dict[str, tuple[ModelShape, int]] = {
    "8b": (QWEN3_8B, 1),
    "14b": (QWEN3_14B, 1),
    "32b": (QWEN3_32B, 2),
}


@dataclass(frozen=True, slots=True)
class SpotResult:
    """What a run came to."""

    steps: tuple[StepReport, ...]
    spot_instance_h: float
    reserved_nodes: int
    moved_turns: int
    mean_remote: float

    @property
    def seconds(self) -> float:
        return self.steps[-1].ended_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated and trained, over all finished steps."""
        return self.tokens_per_s_since(0.0)

    def tokens_per_s_since(self, since_s: float) -> float:
        """The same, from the step on that was under way at a moment."""
        steps = [step for step in self.steps if step.ended_s > since_s]
        return sum(step.tokens for step in steps) / (steps[-1].ended_s - steps[0].began_s)

    @property
    def tokens_per_dollar(self) -> float:
        hours = self.seconds / 3600
        cost = hours * self.reserved_nodes * RESERVED_NODE_PER_H
        cost += self.spot_instance_h * SPOT_INSTANCE_PER_H
        return self.tokens_per_s * self.seconds / cost


def run_spot(
    setup: SpotSetup,
    settings: RolloutSettings,
    trace: Sequence[SpotEvent],
    *,
    seconds: float,
    seed: int = 0,
) -> SpotResult:
    """Steps from 0 s on, until the first that ends after `seconds`."""
    queue: EventQueue[Callable[[], None]] = EventQueue()
    controller = FleetController(settings)
    length_of: dict[TurnId, int] = {}
    body = DrivenEngines(
        controller,
        queue,
        lambda turn: length_of.get(turn, 1),
        InstanceSettings(sender_gb_per_s=20.0 * setup.training_nodes),
    )
    trainer = RolloutTrainer(
        body,
        setup.plan,
        setup.trainer,
        setup.engine,
        local_engines=setup.local_engines,
        max_running=setup.max_running,
        lengths=setup.draw_lengths(seed),
    )
    trainer.length_of = length_of
    provider = SpotProvider(
        body,
        setup.engine,
        max_running=setup.max_running,
        terms=RentalTerms(SPOT_INSTANCE_PER_H, setup.spot_budget),
        slowdown_of=lambda number: setup.slowdown if number % 2 else 1.0,
    )
    trainer.on_limit = provider.limit
    provider.replay(trace)
    body.schedule(0.0, trainer.begin_step)
    body.run_until(
        10 * seconds + 36_000,
        lambda: bool(trainer.reports) and trainer.reports[-1].ended_s >= seconds,
    )
    steps = tuple(trainer.reports)
    end_s = steps[-1].ended_s
    instance_hours = provider.held_seconds(end_s) / 3600
    moved = controller.rollout.state.counters.moved
    return SpotResult(
        steps, instance_hours, setup.training_nodes, moved, instance_hours * 3600 / end_s
    )
