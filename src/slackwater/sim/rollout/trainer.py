"""The simulated trainer of one job: steps of responses, micro-batches on those that are complete.

A step: publish the weights, submit all turns, let local engines seed until the manager ends it, then train on
at least `min_batch` complete responses at a time, in any order, while the rest is generated elsewhere.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slackwater.control.rollout.commands import (
    CompleteTurn,
    EndSeeding,
    FailTurn,
    LimitInstances,
    ResumeSeeding,
    RolloutCommand,
)
from slackwater.control.rollout.events import (
    StepBegan,
    StepEnded,
    TrainerWaits,
    TurnSubmitted,
    WeightsPublished,
)
from slackwater.model.ids import InstanceId, JobId, TrajectoryId, TurnId
from slackwater.model.instance import InstanceKind
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.sim.rollout.body import SimulatedBody
from slackwater.sim.rollout.engine_cost import EngineCost, TrainerCost


@dataclass(frozen=True, slots=True)
class StepPlan:
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


class SimulatedTrainer:
    """Runs steps one after the other; `lengths(step)` gives each response's hidden length."""

    def __init__(
        self,
        body: SimulatedBody,
        plan: StepPlan,
        cost: TrainerCost,
        engine: EngineCost,
        *,
        local_engines: int,
        max_running: int,
        lengths: Callable[[int], Sequence[int]],
    ) -> None:
        self.job = JobId("job")
        self.reports: list[StepReport] = []
        self.most_remote: int | None = None
        self.on_limit: Callable[[], None] = lambda: None
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
        self._free_s = now_s
        self._busy = False
        self._got = 0
        self._trained = 0
        self._tokens = 0
        self._train_s = 0.0
        self._idle_since_s: float | None = None
        self._wait_s = 0.0
        self._seeded_s = 0.0
        self._last_response_s = now_s
        self._ready.clear()

    def begin_step(self) -> None:
        """Publish, seed, submit."""
        self._step += 1
        now_s = self._body.now_s
        self._reset(now_s)
        version = f"v{self._step}"
        self._body.tell(StepBegan(now_s, self.job, self._step, self._plan.turns))
        self._body.tell(WeightsPublished(now_s, self.job, version))
        self._start_local(version)
        sampling = Sampling(max_tokens=self._plan.max_tokens)
        self.length_of.clear()
        for number, tokens in enumerate(self._lengths(self._step)):
            turn = TurnId(f"{self._step}.{number}")
            self.length_of[turn] = tokens
            trajectory = TrajectoryId(turn)
            spec = TurnSpec(turn, trajectory, self.job, self._prompt, sampling, version)
            self._body.tell(TurnSubmitted(now_s, spec))

    def _start_local(self, version: str) -> None:
        for number in range(self._local_engines):
            self._body.join(
                InstanceId(f"local{number}"),
                InstanceKind.LOCAL,
                self._engine,
                max_running=self._max_running,
                holds=version,
            )

    def _take(self, command: RolloutCommand) -> None:
        match command:
            case CompleteTurn(_, tokens):
                self._response(len(tokens))
            case FailTurn(turn, error):
                raise AssertionError(f"{turn} failed: {error}")
            case EndSeeding():
                self._seeding = False
                self._free_s = self._body.now_s + self._cost.switch_s
                self._seeded_s = self._body.now_s - self._began_s
                self._body.at(self._free_s, self._train)
            case ResumeSeeding():
                self._resume()
            case LimitInstances(_, most):
                self.most_remote = most
                self.on_limit()

    def _resume(self) -> None:
        self._seeding = True
        self._end_wait()
        version = f"v{self._step}"

        def start() -> None:
            if self._seeding:
                self._start_local(version)

        self._body.at(self._body.now_s + self._cost.switch_s, start)

    def _response(self, tokens: int) -> None:
        self._got += 1
        self._last_response_s = self._body.now_s
        self._ready.append(tokens)
        self._train()

    def _train(self) -> None:
        """Start the next micro-batch if the devices are free and enough is ready."""
        now_s = self._body.now_s
        if self._seeding or self._busy or now_s < self._free_s - 1e-9:
            return
        all_here = self._got == self._plan.turns
        if not self._ready or (len(self._ready) < self._plan.min_batch and not all_here):
            if self._idle_since_s is None and not all_here:
                self._idle_since_s = now_s
                self._nag(now_s)
            return
        self._end_wait()
        tokens = sum(self._ready)
        count = len(self._ready)
        self._ready.clear()
        rate = self._cost.tokens_per_s
        took_s = tokens / rate + self._cost.microbatch_overhead_s
        self._busy = True
        self._body.at(now_s + took_s, lambda: self._trained_batch(count, tokens, took_s))

    def _nag(self, since_s: float) -> None:
        """Tell the manager that the trainer waits, now and as long as it does."""
        if self._idle_since_s != since_s:
            return
        self._body.stream_all()
        self._body.tell(TrainerWaits(self._body.now_s, self.job, self._tokens, self._train_s))
        self._body.at(self._body.now_s + 5.0, lambda: self._nag(since_s))

    def _end_wait(self) -> None:
        if self._idle_since_s is not None:
            self._wait_s += self._body.now_s - self._idle_since_s
            self._idle_since_s = None

    def _trained_batch(self, count: int, tokens: int, took_s: float) -> None:
        self._busy = False
        self._trained += count
        self._tokens += tokens
        self._train_s += took_s
        if self._trained == self._plan.turns:
            self._body.at(self._body.now_s + self._cost.optimizer_s, self._end_step)
        else:
            self._train()

    def _end_step(self) -> None:
        now_s = self._body.now_s
        self.reports.append(
            StepReport(
                self._began_s, now_s, self._tokens, self._seeded_s, self._train_s, self._wait_s
            )
        )
        remote_wait_s = now_s - self._last_response_s
        self._body.tell(
            StepEnded(
                now_s,
                self.job,
                self._step,
                self._tokens,
                self._train_s,
                self._wait_s,
                remote_wait_s,
            )
        )
        self.begin_step()
