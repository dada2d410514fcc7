"""One step of turns in virtual time: all sent at once, on so many equal instances, with or without
a kill.
"""

from collections.abc import Callable, Iterable, Sequence

from benchmarks.rollout.simulated.driven_engines import DrivenEngines
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.rollout.commands import CompleteTurn, FailTurn
from slackwater.control.rollout.events import TurnSubmitted
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.weights.events import WeightsPublished
from slackwater.model.errors import RefusedError
from slackwater.model.ids import InstanceId, TurnId
from slackwater.model.instance import InstanceKind
from slackwater.model.turn import TurnSpec
from slackwater.sim.core.queue import EventQueue
from slackwater.sim.rollout.engine_cost import CostModel
from slackwater.sim.rollout.simulated_instances import InstanceSettings

_HORIZON_S = 1e6


class _OpenTurns:
    """Hears of the turns that end, and how many instances share the machine meanwhile."""

    def __init__(self, body: DrivenEngines, turns: Iterable[TurnId], alone_slowdown: float) -> None:
        self.left = set(turns)
        self._body = body
        self._alone_slowdown = alone_slowdown
        body.on_command = self._heard

    def _heard(self, command: FleetCommand) -> None:
        if isinstance(command, FailTurn):
            raise RefusedError(f"turn {command.turn} failed in simulation: {command.error}")
        if isinstance(command, CompleteTurn):
            self.left.discard(command.turn)
            self._body.schedule(self._body.now_s, self._share)

    def _share(self) -> None:
        busy = sum(bool(place.engine.requests) for place in self._body.places.values())
        for name in list(self._body.places):
            self._body.slow_down(name, self._alone_slowdown if busy == 1 else 1.0)

    def lose(self, victim: InstanceId) -> None:
        self._body.lose(victim)
        self._share()


def simulate_step(
    specs: Sequence[TurnSpec],
    cost: CostModel,
    names: Sequence[str],
    *,
    max_running: int,
    settings: RolloutSettings | None = None,
    heartbeat_s: float = 0.5,
    kill: tuple[float, str] | None = None,
    alone_slowdown: float = 1.0,
) -> float:
    """How long the step takes; every turn makes all of its tokens. `kill` is when and whom.

    `alone_slowdown` below 1 says that instances share a machine: one that works alone is faster
    than its costs.
    """
    queue: EventQueue[Callable[[], None]] = EventQueue()
    wanted = {spec.turn: spec.sampling.max_tokens for spec in specs}
    links = InstanceSettings(heartbeat_s=heartbeat_s, pull_gb_per_s=1e6, sender_gb_per_s=1e9)
    body = DrivenEngines(FleetController(settings), queue, wanted.__getitem__, links)
    turns = _OpenTurns(body, wanted, alone_slowdown)
    job, version = specs[0].job, specs[0].version
    for name in names:
        kind = InstanceKind.SPOT
        body.join(body.spec(InstanceId(name), kind, cost, max_running=max_running, job=job), cost)
    body.tell(WeightsPublished(0.0, None, version))
    body.run_until(_HORIZON_S, lambda: all(r.versions for r in body.manager.state.instances))
    began_s = body.now_s
    for spec in specs:
        body.tell(TurnSubmitted(began_s, spec))
    if kill is not None:
        after_s, victim = kill
        body.schedule(began_s + after_s, lambda: turns.lose(InstanceId(victim)))
    body.run_until(began_s + _HORIZON_S, lambda: not turns.left)
    body.controller.check_integrity()
    return body.now_s - began_s
