"""Simulated instances: cost models answer the controller's commands with later events.

Tokens are reported before anything that could move a turn. For the controller that is the same as a
report after every step, and it costs far less.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.rollout.commands import AbortTurn, DispatchTurn, ReleaseInstance
from slackwater.control.rollout.events import (
    BudgetChanged,
    InstanceHeartbeat,
    InstanceJoined,
    InstanceLost,
    TokensArrived,
    TurnEnded,
    TurnRefused,
)
from slackwater.control.weights.commands import PullVersion
from slackwater.control.weights.events import InstanceReady, PullFailed
from slackwater.model.ids import InstanceId, JobId, NodeId, TrajectoryId, TurnId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.turn import AttemptId, FinishReason
from slackwater.sim.core.queue import EventQueue
from slackwater.sim.rollout.engine_cost import CostModel
from slackwater.sim.rollout.simulated_engine import Request, SimulatedEngine


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """All pulls share `sender_gb_per_s`; `pull_gb_per_s` is one instance's link."""

    heartbeat_s: float = 5.0
    borrowed_heartbeat_s: float = 5.0
    pull_gb_per_s: float = 5.0
    sender_gb_per_s: float = 20.0
    max_context_tokens: int = 40_960
    max_versions: int = 1


@dataclass(slots=True)
class _Place:
    """One simulated instance."""

    spec: InstanceSpec
    engine: SimulatedEngine
    turn_of: dict[int, tuple[TurnId, str]]
    holds: str | None = None
    wake: int = 0


class SimulatedInstances:
    """Executes the commands of the controller that `tell` leads to. `tokens_of(turn)` says how many
    tokens a turn will have (its hidden length).
    """

    def __init__(
        self,
        queue: EventQueue[Callable[[], None]],
        tokens_of: Callable[[TurnId], int],
        tell: Callable[..., None],
        settings: InstanceSettings | None = None,
    ) -> None:
        self.queue = queue
        self.tell = tell
        self.places: dict[InstanceId, _Place] = {}
        self.trajectory_of: dict[TurnId, TrajectoryId] = {}
        self.breaks: Callable[[], bool] = lambda: False  # whether a pull breaks off
        self._tokens_of = tokens_of
        self._settings = settings or InstanceSettings()
        self._pulls = 0
        self._weight_gb = 0.0

    @property
    def now_s(self) -> float:
        return self.queue.now_s

    def schedule(self, at_s: float, happen: Callable[[], None]) -> None:
        """Let `happen` run at a moment."""
        self.queue.push(max(at_s, self.now_s), happen)

    def spec(
        self,
        instance: InstanceId,
        kind: InstanceKind,
        cost: CostModel,
        *,
        max_running: int,
        job: JobId | None = None,
        base_model: str = "",
        kv_tokens: int | None = None,
        place: NodeId | None = None,
    ) -> InstanceSpec:
        """The spec of an instance with these costs."""
        return InstanceSpec(
            instance,
            kind,
            max_running,
            self._settings.max_context_tokens,
            cost.kv_tokens if kv_tokens is None else max(kv_tokens, 1),
            max_versions=self._settings.max_versions,
            job=job,
            base_model=base_model,
            place=place,
        )

    def join(
        self,
        spec: InstanceSpec,
        cost: CostModel,
        *,
        holds: str | None = None,
        slowdown: float = 1.0,
        engine: SimulatedEngine | None = None,
    ) -> None:
        """Add an instance that `holds` a version, if any. An `engine` of its own advances by itself
        and calls `turns_ended` and `give_back`.
        """
        instance, max_running = spec.instance, spec.max_running
        engine = engine or SimulatedEngine(cost, max_running, self.now_s, slowdown=slowdown)
        place = _Place(spec, engine, {}, holds)
        self.places[instance] = place
        self._weight_gb = cost.weight_bytes / 1e9
        self.tell(InstanceJoined(self.now_s, spec))
        self._beat(place)

    def lose(self, instance: InstanceId, why: str = "preempted") -> None:
        """Lose the instance; its tokens so far are reported first."""
        place = self.places.get(instance)
        if place is None:
            return
        self._advance(place)
        self._stream(place)
        self.places.pop(instance, None)
        self.tell(InstanceLost(self.now_s, instance, why))

    def slow_down(self, instance: InstanceId, slowdown: float) -> None:
        """From now on its work takes `slowdown` times as long as its costs say."""
        place = self.places.get(instance)
        if place is not None and place.engine.slowdown != slowdown:
            self._advance(place)
            place.engine.slowdown = slowdown
            self._arm(place)

    def turns_ended(self, instance: InstanceId) -> None:
        """An engine that moves on by itself has ended turns."""
        place = self.places.get(instance)
        if place is not None:
            self._advance(place)

    def give_back(
        self, instance: InstanceId, requests: list[Request], kv_tokens: int, error: str
    ) -> None:
        """An engine refuses requests that it held, and has another budget from now on."""
        place = self.places.get(instance)
        if place is None:
            return
        self._advance(place)
        self._send(place, requests)
        for request in requests:
            if place.turn_of.pop(request.attempt, None) is not None:
                refused = TurnRefused(
                    self.now_s, instance, AttemptId(request.attempt), error, False
                )
                self.tell(refused)
        max_running = place.engine.max_running
        self.tell(BudgetChanged(self.now_s, instance, max_running, kv_tokens))

    def stream_all(self) -> None:
        """Report every token made so far."""
        for place in list(self.places.values()):
            self._advance(place)
            self._stream(place)

    def execute(self, command: FleetCommand) -> None:
        match command:
            case DispatchTurn():
                self._dispatch(command)
            case AbortTurn(instance, attempt):
                self._abort(instance, attempt)
            case PullVersion(instance, version):
                self._pull(instance, version)
            case ReleaseInstance(instance, _):
                self.places.pop(instance, None)
            case _:
                pass

    def _dispatch(self, command: DispatchTurn) -> None:
        place = self.places.get(command.instance)
        if place is None:
            return  # it was lost meanwhile; its loss is reported
        self._advance(place)
        made = len(command.generated)
        trajectory = self.trajectory_of.get(command.turn, TrajectoryId(command.turn))
        request = Request(
            command.attempt,
            trajectory,
            len(command.prompt) + made,
            max(self._tokens_of(command.turn) - made, 1),
        )
        place.turn_of[command.attempt] = (command.turn, command.version)
        place.engine.add(request)
        self._arm(place)

    def _abort(self, instance: InstanceId, attempt: int) -> None:
        place = self.places.get(instance)
        if place is not None:
            self._advance(place)
            place.engine.abort(attempt)
            place.turn_of.pop(attempt, None)
            self._arm(place)

    def _pull(self, instance: InstanceId, version: str) -> None:
        place = self.places.get(instance)
        if place is None:
            return
        self._pulls += 1
        share = self._settings.sender_gb_per_s / self._pulls
        took_s = self.pull_gb(place.spec, version) / min(self._settings.pull_gb_per_s, share)

        def ready() -> None:
            self._pulls -= 1
            if self.places.get(instance) is not place:
                return
            self.stream_all()
            if self.breaks():
                self.tell(PullFailed(self.now_s, instance, version, "link down"))
            else:
                self.tell(InstanceReady(self.now_s, instance, version))

        self.schedule(self.now_s + took_s, ready)

    def pull_gb(self, spec: InstanceSpec, version: str) -> float:
        """The gigabytes that an instance pulls for a version."""
        return 0.0 if self.places[spec.instance].holds == version else self._weight_gb

    def _beat(self, place: _Place) -> None:
        if self.places.get(place.spec.instance) is not place:
            return
        self._advance(place)
        engine = place.engine
        self.tell(
            InstanceHeartbeat(
                self.now_s,
                place.spec.instance,
                engine.running,
                engine.waiting,
                int(engine.produced),
                engine.kv_used_tokens,
                engine.prefilled,
                engine.stalled,
            )
        )
        borrowed = place.spec.kind is InstanceKind.BORROWED
        every_s = self._settings.borrowed_heartbeat_s if borrowed else self._settings.heartbeat_s
        self.schedule(self.now_s + every_s, lambda: self._beat(place))

    def _arm(self, place: _Place) -> None:
        """Wake up when the engine's batch changes next."""
        place.wake += 1
        serial, at_s = place.wake, place.engine.next_change_s()
        if at_s == float("inf"):
            return

        def wake() -> None:
            current = self.places.get(place.spec.instance) is place
            if current and place.wake == serial:
                self._advance(place)
                self._arm(place)

        self.schedule(at_s, wake)

    def _advance(self, place: _Place) -> None:
        """Bring the engine to now, and report the turns that finished on the way."""
        done = place.engine.advance(self.now_s)
        if not done:
            return
        self._send(place, done)
        for request in done:
            known = place.turn_of.pop(request.attempt, None)
            if known is None:
                continue  # what an earlier end led to has moved it
            turn, version = known
            reason = FinishReason.STOP
            total = self._tokens_of(turn)
            instance = place.spec.instance
            self.tell(
                TurnEnded(self.now_s, instance, AttemptId(request.attempt), reason, total, version)
            )
        self._arm(place)

    def _stream(self, place: _Place) -> None:
        place.engine.settle()
        self._send(place, list(place.engine.requests.values()))

    def _send(self, place: _Place, requests: list[Request]) -> None:
        attempts, counts = [], []
        for request in requests:
            fresh = int(request.made_tokens + 1e-6) - request.reported_tokens
            if fresh > 0:
                request.reported_tokens += fresh
                attempts.append(request.attempt)
                counts.append(fresh)
        if attempts:
            total = sum(counts)
            tokens, logprobs = array("I", bytes(4 * total)), array("f", bytes(4 * total))
            instance = place.spec.instance
            self.tell(TokensArrived(self.now_s, instance, attempts, tokens, logprobs, counts))
