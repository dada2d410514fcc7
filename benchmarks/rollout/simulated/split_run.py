"""Steps of agents on engines of which some share the devices of a trainer: stages of rollouts and
their training, under the live rules for who has the devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.rollout.simulated.agent_run import (
    ROLLOUT_JOB,
    AgentFleet,
    EndedTrajectory,
    Trajectories,
)
from benchmarks.rollout.simulated.driven_engines import DrivenEngines
from benchmarks.rollout.simulated.trainer_cost import TrainerCost
from slackwater.control.devices.messages import GrantDevices
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.steps.commands import StartEngine
from slackwater.control.steps.events import (
    DevicesAsked,
    DevicesReturned,
    DevicesWanted,
    LocalEngineUp,
    StepExpected,
)
from slackwater.control.weights.events import WeightsPublished
from slackwater.model.ids import InstanceId, TurnId, WorkerId
from slackwater.model.instance import InstanceKind
from slackwater.sim.core.queue import EventQueue
from slackwater.sim.rollout.agent_trace import Session

TRAINER = WorkerId("trainer")
VERSION = "v0"


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How a step trains: on the devices of the `local` engines, in micro-batches of at least
    `overlap` trajectories while the rest roll out (0: on all at the end), in the order of the
    prompts or as trajectories end.
    """

    local: int
    overlap: int = 0
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class SplitResult:
    """Seconds until the last trajectory ended and until the step did; `switches`: how often the
    trainer got the devices from engines.
    """

    rollout_s: float
    step_s: float
    switches: int


class OverlappedTrainer:
    """Trains on what is complete whenever it has the devices."""

    def __init__(
        self,
        body: DrivenEngines,
        fleet: AgentFleet,
        plan: SplitPlan,
        cost: TrainerCost,
        trajectories: int,
    ) -> None:
        self.ended_s: float | None = None
        self.switches = 0
        self._agents = body.on_command
        body.on_command = self._take
        self._body = body
        self._fleet = fleet
        self._plan = plan
        self._cost = cost
        self._left = trajectories
        self._ready: dict[int, int] = {}  # tokens by trajectory
        self._next = 0  # in order: the first that was not trained
        self._is_busy = False
        self._engines_ran = False

    def has_ended(self) -> bool:
        """Whether the step has."""
        return self.ended_s is not None

    def complete(self, ended: EndedTrajectory) -> None:
        """A trajectory may be trained on."""
        self._ready[ended.number] = ended.context_tokens
        self._ask()

    def _take(self, command: FleetCommand) -> None:
        match command:
            case StartEngine():
                self._start(command)
            case GrantDevices():
                self._train()
            case _:
                self._agents(command)

    def _start(self, command: StartEngine) -> None:
        self._engines_ran = True
        body, spec = self._body, command.spec

        def start() -> None:
            if body.controller.steps.is_started(spec.instance):
                body.join(spec, self._fleet.engine, holds=VERSION)

        body.schedule(body.now_s + (self._cost.switch_s if command.again else 0.0), start)

    def _batch(self) -> list[int]:
        """The trajectories to train on next, if there are enough."""
        batch = list(self._ready)
        if self._plan.in_order:
            following = range(self._next, self._next + len(self._ready))
            first_gap = next((n for n in following if n not in self._ready), following.stop)
            batch = list(range(self._next, first_gap))
        least = min(self._plan.overlap or self._left, self._left)
        return batch if len(batch) >= least else []

    def _ask(self) -> None:
        if not self._is_busy and self._batch():
            self._is_busy = True
            self._body.stream_all()
            self._body.tell(DevicesAsked(self._body.now_s, TRAINER, ROLLOUT_JOB))

    def _train(self) -> None:
        batch = self._batch()
        tokens = sum(self._ready.pop(number) for number in batch)
        self._next = max(batch) + 1
        took_s = tokens / self._cost.tokens_per_s + self._cost.microbatch_overhead_s
        if self._engines_ran:
            self._engines_ran = False
            self.switches += 1
            took_s += self._cost.switch_s
        self._left -= len(batch)
        took_s += 0.0 if self._left else self._cost.optimizer_s
        done_s = self._body.now_s + took_s
        self._body.schedule(done_s, lambda: self._trained(tokens, took_s))

    def _trained(self, tokens: int, took_s: float) -> None:
        body = self._body
        body.stream_all()
        self._is_busy = False
        if not self._left:
            self.ended_s = body.now_s
        elif self._batch():  # it keeps the devices: no engine is to start meanwhile
            body.tell(DevicesWanted(body.now_s, TRAINER))
        body.tell(DevicesReturned(body.now_s, TRAINER, took_s, not self._left, tokens))
        if self._left:
            self._ask()


def run_split(
    fleet: AgentFleet,
    settings: RolloutSettings,
    steps: Sequence[Sequence[Session]],
    plan: SplitPlan,
) -> list[SplitResult]:
    """Steps one after the other, each with trajectories of its own and the training on them."""
    queue: EventQueue[Callable[[], None]] = EventQueue()
    tokens_of: dict[TurnId, int] = {}
    body = DrivenEngines(FleetController(settings), queue, tokens_of.__getitem__)
    cost = TrainerCost(
        fleet.engine.model, fleet.engine.accelerator, plan.local * fleet.engine.devices
    )
    body.tell(WeightsPublished(0.0, None, VERSION))
    for number in range(fleet.engines):
        kind = InstanceKind.LOCAL if number < plan.local else InstanceKind.DEDICATED
        instance = InstanceId(f"e{number}")
        spec = body.spec(instance, kind, fleet.engine, max_running=fleet.max_running)
        if kind is InstanceKind.LOCAL:
            body.tell(LocalEngineUp(0.0, spec))
        else:
            body.join(spec, fleet.engine, holds=VERSION)
    results: list[SplitResult] = []
    for step, sessions in enumerate(steps):
        began_s = body.now_s
        trajectories = Trajectories(body, sessions, prefix=f"{step}-")
        trajectories.tokens_of = tokens_of
        trainer = OverlappedTrainer(body, fleet, plan, cost, len(sessions))
        trajectories.on_ended = trainer.complete
        turns = sum(len(session) for session in sessions)
        body.tell(StepExpected(began_s, ROLLOUT_JOB, turns))
        trajectories.start()
        body.run_until(began_s + 7 * 86_400.0, trainer.has_ended)
        assert trainer.ended_s is not None, f"{trajectories.left} trajectories never ended"
        rollout_s = max(end.at_s for end in trajectories.ended) - began_s
        results.append(SplitResult(rollout_s, trainer.ended_s - began_s, trainer.switches))
    return results
