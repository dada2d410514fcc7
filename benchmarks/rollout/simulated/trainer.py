"""The simulated trainer of one job: steps of responses, micro-batches on those that are complete.

A step: publish the weights, submit all turns, let local engines seed until the manager ends it,
then train on at least `min_batch` complete responses at a time, in any order, while the rest is
generated elsewhere. Who has the devices, and when a step begins and ends, is for the step book to
say, as in a live service.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.rollout.simulated.driven_engines import DrivenEngines
from benchmarks.rollout.simulated.trainer_cost import TrainerCost
from slackwater.control.devices.messages import GrantDevices
from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.rollout.commands import (
    CompleteTurn,
    EndSeeding,
    FailTurn,
    LimitInstances,
)
from slackwater.control.rollout.events import TurnSubmitted
from slackwater.control.steps.commands import StartEngine
from slackwater.control.steps.events import (
    DevicesAsked,
    DevicesReturned,
    DevicesUnwanted,
    DevicesWanted,
    LocalEngineUp,
    StepExpected,
)
from slackwater.control.weights.events import WeightsPublished
from slackwater.model.ids import InstanceId, JobId, TrajectoryId, TurnId, WorkerId
from slackwater.model.instance import InstanceKind
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.sim.rollout.engine_cost import EngineCost

BASE_MODEL = "policy"
TRAINER = WorkerId("trainer")


@dataclass(frozen=True, slots=True)
class TrainingStepPlan:
    """What one step asks for: RLBoost 6.1 has 128 prompts x 8 responses of at most 14 K tokens."""

    turns: int = 1024
    prompt_tokens: int = 200
    max_tokens: int = 14_336
    min_batch: int = 32


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step."""

    began_s: float
    ended_s: float
    tokens: int
    seeded_s: float
    train_s: float
    trainer_wait_s: float


class RolloutTrainer:
    """Runs steps one after the other; `lengths(step)` gives each response's hidden length."""

    def __init__(
        self,
        body: DrivenEngines,
        plan: TrainingStepPlan,
        cost: TrainerCost,
        engine: EngineCost,
        *,
        local_engines: int,
        max_running: int,
        lengths: Callable[[int], Sequence[int]],
    ) -> None:
        self.job = JobId("job")
        self.reports: list[StepReport] = []
        self.on_limit: Callable[[JobId, int], None] = lambda job, most: None
        self._body = body
        self._plan = plan
        self._cost = cost
        self._engine = engine
        self._local_engines = local_engines
        self._max_running = max_running
        self._lengths = lengths
        self.length_of: dict[TurnId, int] = {}
        self._step = -1
        self._prompt = tuple([1] * plan.prompt_tokens)
        self._ready: deque[int] = deque()
        self._reset(0.0)
        body.on_command = self._take

    def _reset(self, now_s: float) -> None:
        self._began_s = now_s
        self._seeding = True
        self._busy = False
        self._got = 0
        self._trained = 0
        self._tokens = 0
        self._train_s = 0.0
        self._idle_since_s: float | None = None
        self._wait_s = 0.0
        self._seeded_s = 0.0
        self._ready.clear()

    @property
    def version(self) -> str:
        """The weights of the present step."""
        return f"v{self._step}"

    def begin_step(self) -> None:
        """Publish and submit; seeding begins with the first turn."""
        self._step += 1
        now_s = self._body.now_s
        self._reset(now_s)
        if self._step == 0:
            self._bring_engines(now_s)
        tell, version = self._body.tell, self.version
        tell(StepExpected(now_s, self.job, self._plan.turns))
        tell(WeightsPublished(now_s, self.job, version, BASE_MODEL))
        sampling = Sampling(max_tokens=self._plan.max_tokens)
        self.length_of.clear()
        for number, tokens in enumerate(self._lengths(self._step)):
            turn = TurnId(f"{self._step}.{number}")
            self.length_of[turn] = tokens
            trajectory = TrajectoryId(turn)
            spec = TurnSpec(
                turn,
                trajectory,
                self.job,
                self._prompt,
                sampling,
                version,
                base_model=BASE_MODEL,
            )
            tell(TurnSubmitted(now_s, spec))

    def _bring_engines(self, now_s: float) -> None:
        for number in range(self._local_engines):
            spec = self._body.spec(
                InstanceId(f"local{number}"),
                InstanceKind.LOCAL,
                self._engine,
                max_running=self._max_running,
                base_model=BASE_MODEL,
            )
            self._body.tell(LocalEngineUp(now_s, spec))

    def _take(self, command: FleetCommand) -> None:
        match command:
            case CompleteTurn(_, tokens):
                self._response(len(tokens))
            case FailTurn(turn, error):
                raise AssertionError(f"{turn} failed: {error}")
            case EndSeeding():
                self._take_over()
            case StartEngine():
                self._start(command)
            case GrantDevices():
                self._train()
            case LimitInstances(job, most):
                self.on_limit(job, most)
            case _:
                pass

    def _take_over(self) -> None:
        """Seeding is over: the trainer loads its state before it can begin."""
        now_s = self._body.now_s
        self._seeding = False
        self._seeded_s = now_s - self._began_s
        self._busy = True
        self._body.tell(DevicesWanted(now_s, TRAINER))

        def loaded() -> None:
            self._busy = False
            if self._enough():
                self._ask()
            else:
                self._body.tell(DevicesUnwanted(self._body.now_s, TRAINER))
                self._ask()

        self._body.schedule(now_s + self._cost.switch_s, loaded)

    def _start(self, command: StartEngine) -> None:
        """A local engine works: at once when a step begins, after loading when it takes over in
        its middle.
        """
        self._seeding = True
        self._end_wait()
        spec, version = command.spec, self.version

        def start() -> None:
            if self._seeding:
                self._body.join(spec, self._engine, holds=version)

        if command.again:
            self._body.schedule(self._body.now_s + self._cost.switch_s, start)
        else:
            start()

    def _response(self, tokens: int) -> None:
        self._got += 1
        self._ready.append(tokens)
        self._ask()

    def _ask(self) -> None:
        """Ask for the devices if enough is ready for the next micro-batch."""
        if self._seeding or self._busy:
            return
        now_s = self._body.now_s
        if not self._enough():
            if self._idle_since_s is None and self._got < self._plan.turns:
                self._idle_since_s = now_s
            return
        self._end_wait()
        self._busy = True
        self._body.tell(DevicesAsked(now_s, TRAINER, self.job))

    def _enough(self) -> bool:
        all_here = self._got == self._plan.turns
        return bool(self._ready) and (all_here or len(self._ready) >= self._plan.min_batch)

    def _train(self) -> None:
        tokens, count = sum(self._ready), len(self._ready)
        self._ready.clear()
        took_s = tokens / self._cost.tokens_per_s + self._cost.microbatch_overhead_s
        done_s = self._body.now_s + took_s
        self._body.schedule(done_s, lambda: self._trained_batch(count, tokens, took_s))

    def _end_wait(self) -> None:
        if self._idle_since_s is not None:
            self._wait_s += self._body.now_s - self._idle_since_s
            self._idle_since_s = None

    def _trained_batch(self, count: int, tokens: int, took_s: float) -> None:
        self._trained += count
        self._tokens += tokens
        self._train_s += took_s
        if self._trained == self._plan.turns:
            optimizer_s = self._cost.optimizer_s
            end_s = self._body.now_s + optimizer_s
            self._body.schedule(end_s, lambda: self._end_step(tokens, took_s))
            return
        self._body.stream_all()
        self._busy = False
        if self._enough():  # it keeps the devices: nobody else is to start meanwhile
            self._body.tell(DevicesWanted(self._body.now_s, TRAINER))
        done = DevicesReturned(self._body.now_s, TRAINER, took_s, trained_tokens=tokens)
        self._body.tell(done)
        self._ask()

    def _end_step(self, tokens: int, took_s: float) -> None:
        now_s = self._body.now_s
        self.reports.append(
            StepReport(
                self._began_s, now_s, self._tokens, self._seeded_s, self._train_s, self._wait_s
            )
        )
        self._busy = False
        self._body.tell(
            DevicesReturned(now_s, TRAINER, took_s, ends_step=True, trained_tokens=tokens)
        )
        self.begin_step()
