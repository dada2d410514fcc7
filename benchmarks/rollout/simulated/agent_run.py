"""One rollout stage of multi-turn trajectories on a fleet: how long until the last one ends (ROSE
6.4).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.rollout.simulated.driven_engines import DrivenEngines
from benchmarks.rollout.simulated.extra_capacity import ExtraCapacity
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.rollout.commands import CompleteTurn, FailTurn
from slackwater.control.rollout.events import TurnSubmitted
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.weights.events import WeightsPublished
from slackwater.model.ids import InstanceId, JobId, TrajectoryId, TurnId
from slackwater.model.instance import InstanceKind
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.sim.core.queue import EventQueue
from slackwater.sim.rollout.agent_trace import Session
from slackwater.sim.rollout.engine_cost import EngineCost

ROLLOUT_JOB = JobId("job")


@dataclass(frozen=True, slots=True)
class AgentFleet:
    """Dedicated engines (ROSE 6: 8 of one H800 for 8B, 4 of four for 32B), 16 turns for each
    device.
    """

    engine: EngineCost
    engines: int
    turns_per_device: int = 16

    @property
    def max_running(self) -> int:
        return self.turns_per_device * self.engine.devices


@dataclass(frozen=True, slots=True)
class EndedTrajectory:
    """When a trajectory ended, and its tokens."""

    number: int
    at_s: float
    context_tokens: int


@dataclass(frozen=True, slots=True)
class AgentResult:
    """`seconds` until the last trajectory ended; prefilled over prompt tokens says how warm caches
    were.
    """

    seconds: float
    turns: int
    prompt_tokens: int
    prefilled_tokens: int
    output_tokens: int
    ended: tuple[EndedTrajectory, ...]

    @property
    def prefilled_share(self) -> float:
        return self.prefilled_tokens / max(self.prompt_tokens, 1)


class Trajectories:
    """Each submits its next turn when the last has ended and its environment has answered."""

    def __init__(
        self,
        body: DrivenEngines,
        sessions: Sequence[Session],
        prefix: str = "",
        most_live: int | None = None,
    ) -> None:
        """`most_live`: so many are begun at once, and another when one has ended; else all."""
        self._waiting = list(range(len(sessions)))[::-1]
        self._most_live = most_live or len(sessions)
        self._body = body
        self._prefix = prefix
        self._sessions = sessions
        self.ended: list[EndedTrajectory] = []
        self.on_ended: Callable[[EndedTrajectory], None] = lambda ended: None
        self.tokens_of: dict[TurnId, int] = {}
        self.turns = 0
        body.on_command = self._take

    @property
    def left(self) -> int:
        """Trajectories that have not ended."""
        return len(self._sessions) - len(self.ended)

    def start(self) -> None:
        for _ in range(min(self._most_live, len(self._sessions))):
            self._submit(self._waiting.pop(), 0)

    def _submit(self, number: int, index: int) -> None:
        turn = self._sessions[number][index]
        name = TurnId(f"{self._prefix}{number}.{index}")
        trajectory = TrajectoryId(f"{self._prefix}c{number}")
        self.tokens_of[name] = turn.output_tokens
        self._body.trajectory_of[name] = trajectory
        spec = TurnSpec(
            name,
            trajectory,
            ROLLOUT_JOB,
            range(turn.prompt_tokens),
            Sampling(max_tokens=turn.output_tokens),
            "v0",
        )
        self._body.tell(TurnSubmitted(self._body.now_s, spec))

    def _take(self, command: FleetCommand) -> None:
        match command:
            case CompleteTurn(turn):
                self._next(turn)
            case FailTurn(turn, error):
                raise AssertionError(f"{turn} failed: {error}")
            case _:
                pass

    def _next(self, turn: TurnId) -> None:
        self.turns += 1
        number, index = (int(part) for part in turn.removeprefix(self._prefix).split("."))
        session = self._sessions[number]
        if index + 1 == len(session):
            tokens = session[index].prompt_tokens + session[index].output_tokens
            self.ended.append(EndedTrajectory(number, self._body.now_s, tokens))
            self.on_ended(self.ended[-1])
            if self._waiting:
                self._submit(self._waiting.pop(), 0)
            return
        pause_s = session[index].pause_s
        self._body.schedule(self._body.now_s + pause_s, lambda: self._submit(number, index + 1))


def run_agents(
    fleet: AgentFleet,
    settings: RolloutSettings,
    sessions: Sequence[Session],
    extra: ExtraCapacity | None = None,
    most_live: int | None = None,
) -> AgentResult:
    """All trajectories on the fleet: at once, or at most so many."""
    queue: EventQueue[Callable[[], None]] = EventQueue()
    body = DrivenEngines(
        FleetController(settings), queue, lambda turn: trajectories.tokens_of[turn]
    )
    trajectories = Trajectories(body, sessions, most_live=most_live)
    body.tell(WeightsPublished(0.0, None, "v0"))
    for number in range(fleet.engines):
        instance = InstanceId(f"e{number}")
        kind, turns = InstanceKind.DEDICATED, fleet.max_running
        spec = body.spec(instance, kind, fleet.engine, max_running=turns)
        body.join(spec, fleet.engine, holds="v0")
    engines = [place.engine for place in body.places.values()]
    if extra is not None:
        extra.attach(body, fleet.engine)
    body.schedule(0.0, trajectories.start)
    body.run_until(7 * 86_400.0, lambda: trajectories.left == 0)
    assert trajectories.left == 0, f"{trajectories.left} trajectories never ended"
    return AgentResult(
        body.now_s,
        trajectories.turns,
        sum(turn.prompt_tokens for session in sessions for turn in session),
        sum(engine.prefilled for engine in engines),
        sum(turn.output_tokens for session in sessions for turn in session),
        tuple(trajectories.ended),
    )
