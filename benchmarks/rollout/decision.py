"""How long one decision of the rollout manager takes with 10,000 live turns on 200 instances.

Wall time is what a turn waits; on a machine that does other work it counts that work too, so the
CPU time of the same decisions stands beside it.
"""

from dataclasses import dataclass
from time import perf_counter, process_time

import numpy as np

from benchmarks.options import BenchOptions
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetEvent
from slackwater.control.rollout.commands import DispatchTurn
from slackwater.control.rollout.events import (
    InstanceHeartbeat,
    InstanceJoined,
    InstanceLost,
    TokensArrived,
    TurnEnded,
    TurnSubmitted,
)
from slackwater.control.rollout.manager import WATCH
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.timer import TimerFired
from slackwater.control.weights.events import InstanceReady, WeightsPublished
from slackwater.model.ids import InstanceId, JobId, TrajectoryId, TurnId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.sampling import Sampling
from slackwater.model.turn import FinishReason, TurnSpec

LIVE_TURNS = 10_000
INSTANCES = 200
_JOB = JobId("job")
_PROMPT = tuple(range(64))


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """What one event took, by both clocks, and how many turns it decided on."""

    wall_s: float
    cpu_s: float
    decided: int = 1

    def each(self) -> "list[TimedEvent]":
        """The same, dealt out over the turns decided on."""
        shared = TimedEvent(self.wall_s / max(self.decided, 1), self.cpu_s / max(self.decided, 1))
        return [shared] * self.decided


class FleetLoad:
    """A manager under load; a decision is a turn submitted, a turn ended (its room refilled), or
    moved.
    """

    def __init__(
        self, seed: int, *, instances: int = INSTANCES, live_turns: int = LIVE_TURNS
    ) -> None:
        self.instances = instances
        self.controller = FleetController(RolloutSettings(stall_s=1e9, borrowed_stall_s=1e9))
        self.manager = self.controller.rollout
        self.rng = np.random.default_rng(seed)
        self.now_s = 0.0
        self.running: dict[TurnId, DispatchTurn] = {}
        self.submitted = 0
        self.tell(WeightsPublished(0.0, None, "v1"))
        for number in range(instances):
            self.join(number)
        while len(self.manager.state.turns) < live_turns:
            self.submit()

    def tell(self, event: FleetEvent) -> TimedEvent:
        """Handle an event, and time it."""
        began_s, cpu_s = perf_counter(), process_time()
        commands = self.controller.handle(event)
        cpu_s, wall_s = process_time() - cpu_s, perf_counter() - began_s
        sent = [command for command in commands if isinstance(command, DispatchTurn)]
        for command in sent:
            self.running[command.turn] = command
        return TimedEvent(wall_s, cpu_s, len(sent))

    def join(self, number: int) -> None:
        kind = (InstanceKind.DEDICATED, InstanceKind.SPOT, InstanceKind.BORROWED)[number % 3]
        spec = InstanceSpec(InstanceId(f"i{number}"), kind, 48, 8192, 400_000)
        self.tell(InstanceJoined(self.now_s, spec))
        self.tell(InstanceReady(self.now_s, spec.instance, "v1"))

    def submit(self) -> TimedEvent:
        self.submitted += 1
        trajectory = TrajectoryId(f"c{self.submitted % 12_000}")
        spec = TurnSpec(
            TurnId(f"t{self.submitted}"), trajectory, _JOB, _PROMPT, Sampling(max_tokens=64), "v1"
        )
        return self.tell(TurnSubmitted(self.now_s, spec))

    def end_one(self) -> TimedEvent:
        names = list(self.running)
        command = self.running.pop(names[int(self.rng.integers(len(names)))])
        at = (self.now_s, command.instance)
        self.tell(TokensArrived(*at, [command.attempt], [1], [0.0]))
        total = len(command.generated) + 1
        ended = TurnEnded(*at, command.attempt, FinishReason.STOP, total, "v1")
        return self.tell(ended)

    def lose_one(self) -> list[TimedEvent]:
        """Losing an instance decides on each of its turns: its time per turn."""
        number = int(self.rng.integers(self.instances))
        took = self.tell(InstanceLost(self.now_s, InstanceId(f"i{number}"), "killed"))
        self.join(number)
        return took.each()

    def beat(self) -> list[TimedEvent]:
        """A heartbeat of every instance, a second later."""
        self.now_s += 1.0
        beats: list[TimedEvent] = []
        for record in list(self.manager.state.instances):
            load = record.load
            beat = InstanceHeartbeat(
                self.now_s,
                load.instance,
                load.executing,
                load.pending,
                int(100 * self.now_s),
                load.kv_load_tokens,
            )
            beats.append(self.tell(beat))
        return beats

    def watch(self) -> TimedEvent:
        self.beat()
        return self.tell(TimerFired(self.now_s, WATCH))


def run(options: BenchOptions) -> dict[str, float]:
    """Times in ms per decided turn; the watch (leases, deadlines, balancing) once a second by
    itself.
    """
    load = FleetLoad(options.seed)
    turns = 500 if options.quick else 5000
    decisions: list[TimedEvent] = []
    watches: list[TimedEvent] = []
    for number in range(turns):
        decisions += [load.submit(), load.end_one()]
        if number % 100 == 99:
            decisions += load.lose_one()
            watches.append(load.watch())
            options.progress("decisions", number / turns)
    load.controller.check_integrity()
    wall_ms = 1000 * np.array([took.wall_s for took in decisions])
    cpu_ms = 1000 * np.array([took.cpu_s for took in decisions])
    watch_ms = 1000 * np.array([took.wall_s for took in watches])
    return {
        "p50_ms": float(np.percentile(wall_ms, 50)),
        "p99_ms": float(np.percentile(wall_ms, 99)),
        "max_ms": float(wall_ms.max()),
        "cpu_p50_ms": float(np.percentile(cpu_ms, 50)),
        "cpu_p99_ms": float(np.percentile(cpu_ms, 99)),
        "watch_p99_ms": float(np.percentile(watch_ms, 99)),
        "live_turns": float(len(load.manager.state.turns)),
        "waiting_turns": float(len(load.manager.dispatcher.queue)),
        "instances": float(INSTANCES),
    }
