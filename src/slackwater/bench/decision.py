"""How long one decision of the rollout manager takes with 10,000 live turns on 200 instances."""

from time import perf_counter

import numpy as np

from slackwater.bench.options import BenchOptions
from slackwater.control.rollout.commands import Dispatch
from slackwater.control.rollout.events import (
    InstanceHeartbeat,
    InstanceJoined,
    InstanceLost,
    InstanceReady,
    RolloutEvent,
    TimerFired,
    TokensArrived,
    TurnEnded,
    TurnSubmitted,
    WeightsPublished,
)
from slackwater.control.rollout.manager import WATCH, RolloutManager
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.ids import InstanceId, JobId, TrajectoryId, TurnId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.turn import FinishReason, Sampling, TurnSpec

LIVE_TURNS = 10_000
INSTANCES = 200
_JOB = JobId("job")
_PROMPT = tuple(range(64))


class _Load:
    """A manager under load; a decision is a turn submitted, a turn ended (its room refilled), or moved."""

    def __init__(self, seed: int) -> None:
        self.manager = RolloutManager(RolloutSettings(stall_s=1e9, borrowed_stall_s=1e9))
        self.rng = np.random.default_rng(seed)
        self.now_s = 0.0
        self.running: dict[TurnId, Dispatch] = {}
        self.submitted = 0
        self.tell(WeightsPublished(0.0, _JOB, "v1"))
        for number in range(INSTANCES):
            self.join(number)
        while len(self.manager.books.turns) < LIVE_TURNS:
            self.submit()

    def tell(self, event: RolloutEvent) -> tuple[float, int]:
        """Seconds taken, and how many turns were decided on."""
        started = perf_counter()
        commands = self.manager.handle(event)
        took_s = perf_counter() - started
        sent = [command for command in commands if isinstance(command, Dispatch)]
        for command in sent:
            self.running[command.turn] = command
        return took_s, len(sent)

    def join(self, number: int) -> None:
        kind = (InstanceKind.DEDICATED, InstanceKind.SPOT, InstanceKind.BORROWED)[number % 3]
        spec = InstanceSpec(InstanceId(f"i{number}"), kind, 48, 8192, 400_000)
        self.tell(InstanceJoined(self.now_s, spec))
        self.tell(InstanceReady(self.now_s, spec.instance, "v1"))

    def submit(self) -> float:
        self.submitted += 1
        trajectory = TrajectoryId(f"c{self.submitted % 12_000}")
        spec = TurnSpec(
            TurnId(f"t{self.submitted}"), trajectory, _JOB, _PROMPT, Sampling(max_tokens=64), "v1"
        )
        return self.tell(TurnSubmitted(self.now_s, spec))[0]

    def end_one(self) -> float:
        names = list(self.running)
        command = self.running.pop(names[int(self.rng.integers(len(names)))])
        at = (self.now_s, command.instance)
        self.tell(TokensArrived(*at, [command.attempt], [1], [0.0]))
        total = len(command.generated) + 1
        ended = TurnEnded(*at, command.attempt, FinishReason.STOP, total, "v1")
        return self.tell(ended)[0]

    def lose_one(self) -> list[float]:
        """Losing an instance decides on each of its turns: seconds per turn."""
        number = int(self.rng.integers(INSTANCES))
        took_s, moved = self.tell(InstanceLost(self.now_s, InstanceId(f"i{number}"), "killed"))
        self.join(number)
        return [took_s / moved] * moved if moved else []

    def watch(self) -> float:
        self.now_s += 1.0
        for record in list(self.manager.books.fleet):
            load = record.load
            beat = InstanceHeartbeat(
                self.now_s, load.instance, load.executing, load.pending, 0, load.kv_load_tokens
            )
            self.tell(beat)
        return self.tell(TimerFired(self.now_s, WATCH))[0]


def run(options: BenchOptions) -> dict[str, float]:
    """Times in ms per decided turn; the watch (leases, deadlines, balancing) once a second by itself."""
    load = _Load(options.seed)
    turns = 500 if options.quick else 5000
    decisions_s: list[float] = []
    watches_s: list[float] = []
    for number in range(turns):
        decisions_s.append(load.submit())
        decisions_s.append(load.end_one())
        if number % 100 == 99:
            decisions_s += load.lose_one()
            watches_s.append(load.watch())
            options.progress("decisions", number / turns)
    load.manager.check_integrity()
    ms = 1000 * np.array(decisions_s)
    return {
        "p50_ms": float(np.percentile(ms, 50)),
        "p99_ms": float(np.percentile(ms, 99)),
        "max_ms": float(ms.max()),
        "watch_p99_ms": float(np.percentile(1000 * np.array(watches_s), 99)),
        "live_turns": float(len(load.manager.books.turns)),
        "waiting_turns": float(len(load.manager.books.dispatcher.line)),
        "instances": float(INSTANCES),
    }
