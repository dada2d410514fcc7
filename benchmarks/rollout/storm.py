"""A storm of faults over one fleet controller, from a seed: the invariants are checked after every
event.

Clients run multi-turn trajectories, a trainer runs steps that its devices seed; instances join,
pull, work, vanish, freeze, stall, lie, refuse, lose budget and drain, all at random. Every
completed turn must hold exactly the tokens of an undisturbed run, once, and when the storm is over
everything must end. A seed that fails is a bug report: run it again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.rollout.false_reports import TroubledInstance
from benchmarks.rollout.storm_clients import JOB, StormClients
from benchmarks.rollout.storm_faults import StormFaults
from benchmarks.rollout.storm_trainer import StormTrainer
from slackwater.control.devices.messages import GrantDevices
from slackwater.control.driver import Driver
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.rollout import events as ev
from slackwater.control.rollout.commands import (
    AbortTurn,
    CompleteTurn,
    DispatchTurn,
    FailTurn,
    ReleaseInstance,
)
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.steps.commands import RestEngine, StartEngine
from slackwater.control.weights.commands import DeleteVersion, DropVersion, PullVersion
from slackwater.control.weights.events import InstanceReady, PullFailed, WeightsPublished
from slackwater.model.ids import InstanceId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.policy.rollout.balancing import FillIdle
from slackwater.policy.rollout.routing import CacheAffine
from slackwater.policy.rollout.seeding import AdaptiveWindow
from slackwater.sim.core.queue import EventQueue, name_failing_event
from slackwater.sim.rollout.storm_instance import StormRequest

BEAT_S = 4.0
FRAME_S = 4.0
_KINDS = (
    InstanceKind.DEDICATED,
    InstanceKind.SPOT,
    InstanceKind.SPOT,
    InstanceKind.BORROWED,
)


@dataclass(frozen=True, slots=True)
class StormReport:
    """What a storm came to."""

    seed: int
    hours: float
    events: int
    completed_turns: int
    failed_turns: int
    moved_turns: int
    instances: int
    late_tokens: int
    faults_reported: int


def _settings(seed: int) -> RolloutSettings:
    """Even seeds storm over the papers' rules, odd ones over ours."""
    ours = RolloutSettings(stall_s=30.0, turn_timeout_s=900.0)
    if seed % 2:
        return ours
    seeding = AdaptiveWindow(initial_s=30.0)
    return replace(ours, routing=CacheAffine(), balancing=FillIdle(), seeding=seeding)


class Storm:
    """One seeded run. `happen(event)` gives the controller an event and checks it."""

    def __init__(self, seed: int, settings: RolloutSettings | None = None) -> None:
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.controller = FleetController(settings or _settings(seed))
        self.manager = self.controller.rollout
        self.queue: EventQueue[Callable[[], None]] = EventQueue()
        self.instances: dict[InstanceId, TroubledInstance] = {}
        self.raging = True
        self.version = 0
        self.published_s = 0.0
        self._serial = 0
        self._heard_s: dict[InstanceId, float] = {}
        self.deleted: set[str] = set()
        self.driver = Driver(
            self.controller,
            self._do,
            clock=lambda: self.queue.now_s,
            schedule=self.queue.push_soon,
            handled=self._check,
        )
        self.clients = StormClients(self)
        self.faults = StormFaults(self)
        self.trainer = StormTrainer(self)

    @property
    def now_s(self) -> float:
        return self.queue.now_s

    def run(self, hours: float) -> StormReport:
        """Rage for so long, then calm down and see that everything ends."""
        for _ in range(4):
            self.join()
        self.publish()
        self.clients.start()
        self.faults.start()
        self.trainer.start()
        self._run_until(hours * 3600)
        self.raging = False
        calm_s = self.now_s + 4 * self.manager.state.settings.turn_timeout_s
        if not any(i.spec.kind is not InstanceKind.BORROWED for i in self.instances.values()):
            self.join()
        self._run_until(calm_s, lambda: not self.manager.state.turns and not self.trainer.stepping)
        left = len(self.manager.state.turns)
        assert left == 0, f"{left} turns never ended"
        assert not self.trainer.stepping, "the trainer's step never ended"
        counters = self.manager.state.counters
        return StormReport(
            self.seed,
            hours,
            self.driver.events,
            counters.completed,
            counters.failed,
            counters.moved,
            self._serial,
            counters.late_tokens,
            counters.faults,
        )

    def _run_until(self, end_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        while len(self.queue) and self.now_s < end_s and not stop():
            self.queue.pop()()

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.queue.push(self.now_s + seconds, happen)

    def wait_s(self, mean_s: float) -> float:
        """A random wait."""
        return float(self.rng.exponential(mean_s))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def happen(self, event: FleetEvent) -> None:
        """Tell the controller, do what it says, and check the invariants; then what followed
        meanwhile.
        """
        if isinstance(event, ev.InstanceLost):
            self.trainer.lost(event.instance)
        with name_failing_event(self.driver, self.queue):
            self.driver.feed(event)

    def _check(self) -> None:
        self.controller.check_integrity()
        self.trainer.check_integrity()

    def publish(self) -> None:
        """A new version; turns of the old one may still be running."""
        self.version += 1
        version = f"v{self.version}"
        self.happen(WeightsPublished(self.now_s, JOB, version, JOB, adapter=self.chance(0.5)))

    def spec(self, kind: InstanceKind | None = None, base_model: str = "") -> InstanceSpec:
        """A new instance, of a random kind and perhaps for one job, unless it is for a base
        model.
        """
        self._serial += 1
        return InstanceSpec(
            InstanceId(f"i{self._serial}"),
            kind or _KINDS[int(self.rng.integers(len(_KINDS)))],
            max_running=int(self.rng.integers(2, 9)),
            max_context_tokens=256,
            kv_tokens=int(self.rng.integers(300, 1500)),
            max_versions=int(self.rng.integers(1, 4)),
            max_adapters=int(self.rng.integers(0, 3)),
            job=JOB if not base_model and self.chance(0.3) else None,
            base_model=base_model,
            sleeps=kind is InstanceKind.LOCAL and self.chance(0.5),
        )

    def join(self, spec: InstanceSpec | None = None) -> None:
        """An instance comes."""
        spec = spec or self.spec()
        instance = TroubledInstance(spec, self._serial)
        self.instances[spec.instance] = instance
        self.happen(ev.InstanceJoined(self.now_s, spec))
        self._beat(instance)
        self._frame(instance)

    def lives(self, instance: TroubledInstance) -> bool:
        return self.instances.get(instance.instance) is instance

    def _do(self, command: FleetCommand) -> None:
        match command:
            case DispatchTurn():
                self._deliver(command.instance, lambda: self._receive(command))
            case AbortTurn(instance, attempt):
                self._deliver(instance, lambda: self._forget(instance, attempt))
            case PullVersion(instance, version):
                place, took_s = self.instances.get(instance), self.wait_s(4.0)
                # It begins when it is told to: a version that it drops before may be the same.
                pulled = partial(self.after, took_s, partial(self._pulled, place, version))
                self._deliver(instance, pulled)
            case CompleteTurn():
                self.clients.completed(command)
            case FailTurn():
                self.clients.failed(command)
            case ReleaseInstance(instance, _):
                self.instances.pop(instance, None)
                self.trainer.released(instance)
            case StartEngine() | GrantDevices() | RestEngine():
                self.trainer.take(command)
            case DropVersion(instance, version):
                self._deliver(instance, lambda: self._dropped(instance, version))
            case DeleteVersion(version):
                self.deleted.add(version)
            case _:
                pass  # nothing to simulate

    def _deliver(self, instance: InstanceId, happen: Callable[[], None]) -> None:
        """After a while, and in the order of sending: an instance has one connection."""
        at_s = max(self._heard_s.get(instance, 0.0), self.now_s + self.wait_s(0.02))
        self._heard_s[instance] = at_s
        self.queue.push(at_s, happen)

    def _receive(self, command: DispatchTurn) -> None:
        instance = self.instances.get(command.instance)
        if instance is None:
            return
        if self.clients.is_bad(command.turn) or self.now_s < instance.refuses_until_s:
            at_fault = self.clients.is_bad(command.turn)
            why = "cannot be run" if at_fault else "budget cut"
            self.happen(
                ev.TurnRefused(self.now_s, command.instance, command.attempt, why, at_fault)
            )
            return
        current = command.attempt in self.manager.dispatcher.attempts
        held = command.version in instance.versions
        assert held or not current, (
            f"{command.turn} sent to {command.instance} without {command.version}"
        )
        total = self.clients.hidden_tokens(command.turn)
        made = len(command.generated)
        instance.requests[command.attempt] = StormRequest(command, total, made)

    def _forget(self, instance: InstanceId, attempt: int) -> None:
        if instance in self.instances:
            self.instances[instance].requests.pop(attempt, None)

    def _pulled(self, place: TroubledInstance | None, version: str) -> None:
        """Nothing is heard of a pull by an instance that has gone meanwhile, also where another
        has its name.
        """
        if place is None or not self.lives(place):
            return
        instance = place.instance
        if self.raging and self.chance(0.05):
            self.happen(PullFailed(self.now_s, instance, version, "link down"))
            return
        assert version not in self.deleted, f"{instance} pulls {version}, which is deleted"
        self.instances[instance].versions.add(version)
        self.happen(InstanceReady(self.now_s, instance, version))

    def _dropped(self, instance: InstanceId, version: str) -> None:
        place = self.instances.get(instance)
        if place is None:
            return
        used = [r for r in place.requests.values() if r.command.version == version]
        assert not used, f"{instance} drops {version}, which {used[0].command.turn} runs with"
        place.versions.discard(version)

    def _beat(self, instance: TroubledInstance) -> None:
        if not self.lives(instance):
            return
        if self.now_s >= instance.frozen_until_s:
            stalled = self.now_s < instance.stalled_until_s and instance.says_stalled
            running = min(len(instance.requests), instance.spec.max_running)
            self.happen(
                ev.InstanceHeartbeat(
                    self.now_s,
                    instance.instance,
                    running,
                    len(instance.requests) - running,
                    instance.produced_tokens,
                    instance.kv_used_tokens,
                    stalled=stalled,
                )
            )
        self.after(BEAT_S, lambda: self._beat(instance))

    def _frame(self, instance: TroubledInstance) -> None:
        """One engine step: a few tokens of every running request, then the endings."""
        if not self.lives(instance):
            return
        silent = max(instance.frozen_until_s, instance.stalled_until_s)
        if self.now_s >= silent and instance.requests:
            self._step(instance)
        self.after(FRAME_S * float(self.rng.uniform(0.5, 1.5)), lambda: self._frame(instance))

    def _step(self, instance: TroubledInstance) -> None:
        if instance.lie is not None:
            lie, instance.lie = instance.lie, None
            self.faults.tell(instance, lie)
            return
        attempts, counts, tokens = [], [], []
        for attempt, request in list(instance.requests.items())[: instance.spec.max_running]:
            made = request.next_tokens(int(self.rng.integers(1, 5)))
            if made:
                attempts.append(attempt)
                counts.append(len(made))
                tokens += made
        instance.produced_tokens += len(tokens)
        if attempts:
            logprobs = [-1.0] * len(tokens)
            self.happen(
                ev.TokensArrived(self.now_s, instance.instance, attempts, tokens, logprobs, counts)
            )
        self.end_finished(instance)

    def end_finished(self, instance: TroubledInstance) -> None:
        """Say that the turns with all their tokens have ended."""
        for attempt, request in list(instance.requests.items()):
            if request.made_tokens >= request.total_tokens and self.lives(instance):
                del instance.requests[attempt]
                self.happen(self.ending(instance, request))

    def ending(self, instance: TroubledInstance, request: StormRequest) -> ev.TurnEnded:
        """The honest ending of a request."""
        command = request.command
        reason = self.clients.reason(command.turn)
        return ev.TurnEnded(
            self.now_s,
            instance.instance,
            command.attempt,
            reason,
            request.made_tokens,
            command.version,
        )


def weather(seed: int, hours: float, settings: RolloutSettings | None = None) -> StormReport:
    """Run one storm."""
    return Storm(seed, settings).run(hours)
