"""Turns and versions, live: the brain's commands become messages to engines, their frames its events."""

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from slackwater.control.brain import BrainCommand, BrainEvent
from slackwater.control.controller import Controller
from slackwater.control.jobs import commands as job_do
from slackwater.control.jobs.driver_commands import (
    DriverCommand,
    EndDriver,
    KeepDriver,
    SetDriverTimer,
    StartDriver,
)
from slackwater.control.jobs.events import JobAnswered
from slackwater.control.rollout import commands as do
from slackwater.control.rollout import events as on
from slackwater.control.steps import commands as step_do
from slackwater.control.steps.events import LocalEngineUp
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.control.weights import commands as weight_do
from slackwater.control.weights import events as of_weight
from slackwater.model.ids import InstanceId, JobId, NodeId, TenantId, TurnId, WorkerId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.turn import AttemptId, FinishReason, TurnSpec
from slackwater.runtime.bodies.lending import LendingBody
from slackwater.runtime.bodies.phases import PhasesBody
from slackwater.runtime.bodies.relays import RelayBody
from slackwater.runtime.bodies.timers import Timers
from slackwater.runtime.bodies.trainer_devices import TrainerDevices
from slackwater.runtime.bodies.trajectory_index import TrajectoryIndex
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.services.kept_promise import KeptPromise
from slackwater.runtime.services.meters import Meters
from slackwater.wire import messages
from slackwater.wire.frames import Frame, FrameKind
from slackwater.wire.lending import BudgetReport, LoanOver
from slackwater.wire.tokens import decode_tokens

logger = logging.getLogger(__name__)

TurnResult: TypeAlias = do.CompleteTurn  # what the service is given of a turn
TurnTokens: TypeAlias = do.AppendTokens  # and of one that streams


class TurnListener(Protocol):
    """Who is told how a turn goes."""

    def appended(self, more: do.AppendTokens) -> None: ...
    def completed(self, result: TurnResult) -> None: ...
    def failed(self, error: str) -> None: ...


class RolloutBody:
    """One brain, all engines. `release` ends an engine's process, `delete` a version in the store."""

    def __init__(
        self,
        hub: WorkerHub,
        brain: Controller[BrainEvent, BrainCommand],
        release: Callable[[WorkerId], None],
        delete: Callable[[str], None] = lambda version: None,
        meters: Meters | None = None,
    ) -> None:
        self._meters = meters or Meters()
        self._since_s: dict[TurnId, float] = {}
        self._streaming: set[TurnId] = set()
        self._hub = hub
        self._brain = brain
        self._release = release
        self._delete = delete
        self._timers = Timers(lambda name: self.feed(TimerFired(_now_s(), name)))
        self._inbox: deque[BrainEvent] = deque()
        self._feeding = False
        self._listeners: dict[TurnId, TurnListener] = {}
        self._specs: dict[TurnId, TurnSpec] = {}
        self._trajectories = TrajectoryIndex()
        self.devices = TrainerDevices(self.feed)
        self.relays = RelayBody(hub, self.feed)
        self.gauges: dict[WorkerId, dict[str, float]] = {}
        self._topk: dict[WorkerId, list[list[tuple[int, float]]]] = {}
        self.lending: LendingBody | None = None
        self.carry_out_of_drivers: Callable[[DriverCommand], None] | None = None
        self.promise: KeptPromise | None = None
        self.phases: PhasesBody | None = None
        self.place_of: Callable[[WorkerId], NodeId | None] = lambda worker: None

    # ---- for the service ----
    def submit(
        self, spec: TurnSpec, listener: TurnListener, arrived_s: float | None = None
    ) -> None:
        """Have a turn generated; it belongs to the trajectory that its prompt continues, if any.

        `arrived_s`: when its user's request came, if one waits for its first token.
        """
        known = self._trajectories.continued_by(spec.version, spec.prompt)
        if known is not None:
            spec = dataclasses.replace(spec, trajectory=known)
        since_s = _now_s() if arrived_s is None else arrived_s
        promise, waits = self.promise, arrived_s is not None
        if promise is not None and waits and spec.base_model == promise.model:
            spec = dataclasses.replace(spec, stream=True)  # so that its first token is seen
            promise.arrived(spec.turn, since_s)
        self._listeners[spec.turn] = listener
        self._specs[spec.turn] = spec
        self._since_s[spec.turn] = since_s
        self.feed(on.TurnSubmitted(_now_s(), spec))
        if self.lending is not None:
            self.lending.rolls_out(spec.job, spec.base_model)

    def cancel(self, turn: TurnId) -> None:
        """The client does not want it any more; its listener hears nothing more."""
        if self._listeners.pop(turn, None) is not None:
            self._measure(self._specs.pop(turn), 0, "cancelled")
            if self.promise is not None:
                self.promise.given_up(turn, _now_s())
            self.feed(on.TurnCancelled(_now_s(), turn))

    def _measure(self, spec: TurnSpec, tokens: int, outcome: str) -> None:
        self._streaming.discard(spec.turn)
        took_s = _now_s() - self._since_s.pop(spec.turn)
        self._meters.turn_ended(spec, took_s, tokens, outcome)

    def name_owners(self, tenants: Sequence[str]) -> None:
        """Whose turns may come."""
        self.feed(on.OwnersNamed(_now_s(), tuple(TenantId(name) for name in tenants)))

    def published(
        self,
        version: str,
        base_model: str,
        job: JobId | None = None,
        *,
        line: str = "",
        adapter: bool = False,
        sampled: bool = True,
    ) -> None:
        """A version can be pulled; see `WeightsPublished`."""
        self.feed(
            of_weight.WeightsPublished(
                _now_s(), job, version, base_model, line=line, adapter=adapter, sampled=sampled
            )
        )

    def retired(self, version: str) -> None:
        """Nothing names the version any more; it is deleted when nobody needs it."""
        self.feed(of_weight.WeightsRetired(_now_s(), version))

    def notice(self, instance: InstanceId, leaves_in_s: float) -> None:
        """It will be taken away: its turns move now."""
        now_s = _now_s()
        self.feed(on.InstanceNotice(now_s, instance, now_s + leaves_in_s))

    def drain(self, instance: InstanceId, move_turns: bool) -> None:
        """It takes no more turns, and is released once it has none."""
        self.feed(on.DrainAsked(_now_s(), instance, move_turns))

    def live(self) -> int:
        """How many turns are under way."""
        return len(self._listeners)

    def live_jobs(self) -> set[JobId]:
        """Whose."""
        return {spec.job for spec in self._specs.values()}

    def close(self) -> None:
        self._timers.cancel_all()

    # ---- for the hub ----
    def engine_joined(self, worker: WorkerId, facts: messages.EngineFacts) -> None:
        if self.lending is not None:
            self.lending.joined(worker, facts)
        spec = InstanceSpec(
            instance=InstanceId(worker),
            kind=InstanceKind(facts.kind),
            max_running=facts.max_running,
            max_context_tokens=facts.max_context_tokens,
            kv_tokens=facts.kv_tokens,
            max_versions=facts.max_versions,
            exact_continuation=facts.exact_continuation,
            base_model=facts.base_model,
            max_adapters=facts.max_adapters,
            job=None if facts.job is None else JobId(facts.job),
            node=NodeId(facts.node) if facts.node else None,
            place=self.place_of(worker),
        )
        local = spec.kind is InstanceKind.LOCAL
        self.feed(LocalEngineUp(_now_s(), spec) if local else on.InstanceJoined(_now_s(), spec))

    def engine_lost(self, worker: WorkerId, reason: str) -> None:
        self._topk.pop(worker, None)
        self.gauges.pop(worker, None)
        if self.lending is not None:
            self.lending.lost(worker)
        self.feed(on.InstanceLost(_now_s(), InstanceId(worker), reason))

    def engine_said(self, worker: WorkerId, frame: Frame) -> None:
        """One frame; token frames go the short way."""
        now_s, instance = _now_s(), InstanceId(worker)
        if frame.kind is FrameKind.TOKENS:
            columns = decode_tokens(frame.body)
            others = self._topk.pop(worker, ())
            self.feed(on.TokensArrived(now_s, instance, *columns, topk=others))
            return
        match messages.decode_from_worker(frame.body):
            case messages.Ended(request, reason, total_tokens, version):
                attempt, why = AttemptId(request), FinishReason(reason)
                self.feed(on.TurnEnded(now_s, instance, attempt, why, total_tokens, version))
            case messages.GenerateRefused(request, error, at_fault):
                attempt = AttemptId(request)
                self.feed(on.TurnRefused(now_s, instance, attempt, error, at_fault))
            case messages.PromptScores(request, logprobs, topk, targets, drawn):
                attempt = AttemptId(request)
                self.feed(on.PromptScored(now_s, instance, attempt, logprobs, topk, targets, drawn))
            case messages.SampledTopK(rows):
                self._topk[worker] = rows
            case messages.VersionReady(version, kept):
                self.feed(of_weight.InstanceReady(now_s, instance, version, kept))
            case messages.VersionFailed(version, error):
                self.feed(of_weight.PullFailed(now_s, instance, version, error))
            case messages.Heartbeat() | BudgetReport() | LoanOver() as said:
                self._said_of_itself(now_s, worker, said)
            case other:
                logger.warning("not from an engine message=%s", type(other).__name__)

    def _said_of_itself(
        self, now_s: float, worker: WorkerId, said: messages.Heartbeat | BudgetReport | LoanOver
    ) -> None:
        instance = InstanceId(worker)
        match said:
            case messages.Heartbeat(gauges):
                self.gauges[worker] = gauges
                self.feed(_heartbeat(now_s, instance, gauges))
                if self.lending is not None:
                    self.lending.heartbeat(worker, gauges)
            case BudgetReport(max_running, kv_tokens):
                self.feed(on.BudgetChanged(now_s, instance, max_running, kv_tokens))
            case LoanOver(error):
                if self.lending is not None:
                    self.lending.over(worker, error)

    # ---- commands ----
    def feed(self, event: BrainEvent) -> None:
        """Tell the brain and do what it says; events that follow from that wait their turn."""
        if self._feeding:
            self._inbox.append(event)
            return
        self._feeding = True
        try:
            self._handle(event)
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._feeding = False

    def _handle(self, event: BrainEvent) -> None:
        if self.phases is None:
            self._decide(event)
            return
        with self.phases.decision():
            self._decide(event)

    def _decide(self, event: BrainEvent) -> None:
        for command in self._brain.handle(event):
            self._apply(command)

    def _apply(self, command: BrainCommand) -> None:
        match command:
            case do.AppendTokens() | do.CompleteTurn() | do.FailTurn():
                self._tell(command)
            case SetTimer(name, at_s):
                self._timers.set(name, at_s)
            case do.Dispatch() | do.AbortOn() | weight_do.PullWeights() | weight_do.DropVersion():
                self._hub.send(WorkerId(command.instance), _message(command))
            case do.ReleaseInstance(instance, reason):
                logger.warning("engine released instance=%s reason=%s", instance, reason)
                self._release(WorkerId(instance))
            case do.ReportFault(instance, what):
                logger.warning("engine fault instance=%s what=%s", instance, what)
            case do.EndSeeding(job, reason):
                logger.info("seeding ended job=%s reason=%s", job, reason)
            case do.ResumeSeeding(job, reason):
                logger.info("seeding resumed job=%s reason=%s", job, reason)
            case do.LimitInstances(job, most):
                logger.info("more would not help job=%s most=%d", job, most)
            case _:
                self._apply_rare(command)

    def _apply_rare(self, command: BrainCommand) -> None:
        match command:
            case step_do.StartEngine(spec):
                self.feed(on.InstanceJoined(_now_s(), spec))
            case step_do.RestEngine(instance, reason):
                logger.info("engine rests instance=%s reason=%s", instance, reason)
            case step_do.GrantDevices(trainer):
                self.devices.granted(trainer)
            case weight_do.BringCargo() | weight_do.DropCargo():
                self.relays.carry_out(command)
            case weight_do.DeleteVersion(version):
                self._delete(version)
            case job_do.PlaceJob(job):
                # Every job shares the service's engines and trainers.
                self.feed(JobAnswered(_now_s(), job, "placed", "shares what the service has"))
            case KeepDriver() | StartDriver() | EndDriver() | SetDriverTimer():
                if self.carry_out_of_drivers is not None:
                    self.carry_out_of_drivers(command)
            case _:
                if self.phases is None or not self.phases.obey(command):
                    logger.error("a command that nobody carries out: %s", type(command).__name__)

    def _tell(self, command: do.AppendTokens | do.CompleteTurn | do.FailTurn) -> None:
        if isinstance(command, do.AppendTokens):
            if (listener := self._listeners.get(command.turn)) is not None:
                if command.turn not in self._streaming:
                    self._streaming.add(command.turn)
                    waited_s = _now_s() - self._since_s[command.turn]
                    self._meters.first_token(self._specs[command.turn], waited_s)
                    if self.promise is not None:
                        self.promise.passed_on(command.turn, _now_s())
                listener.appended(command)
            return
        listener = self._listeners.pop(command.turn, None)
        if listener is None:
            return
        spec = self._specs.pop(command.turn)
        tokens = command.tokens if isinstance(command, do.CompleteTurn) else ()
        completed = isinstance(command, do.CompleteTurn)
        self._measure(spec, len(tokens), "completed" if completed else "failed")
        if self.promise is not None and completed:
            self.promise.answered(spec.turn, _now_s(), len(tokens))
        elif self.promise is not None:
            self.promise.failed(spec.turn, _now_s())
        if isinstance(command, do.CompleteTurn):
            self._trajectories.ended(spec.version, spec.prompt, tokens, spec.trajectory)
            listener.completed(command)
        else:
            listener.failed(command.error)


def _message(
    command: do.Dispatch | do.AbortOn | weight_do.PullWeights | weight_do.DropVersion,
) -> messages.Message:
    match command:
        case do.Dispatch():
            return messages.Generate(
                command.attempt,
                command.version,
                np.asarray(command.prompt, "<u4").tobytes(),
                np.asarray(command.generated, "<u4").tobytes(),
                command.sampling,
                command.score_prompt,
                command.owner,
            )
        case do.AbortOn(_, attempt):
            return messages.Abort(attempt)
        case weight_do.PullWeights(_, version, way, keep):
            cargoes = tuple((cargo.version, cargo.base) for cargo in way)
            return messages.PullVersion(version, cargoes, keep)
        case weight_do.DropVersion(_, version):
            return messages.DropVersion(version)


def _heartbeat(
    now_s: float, instance: InstanceId, gauges: dict[str, float]
) -> on.InstanceHeartbeat:
    return on.InstanceHeartbeat(
        now_s,
        instance,
        running=int(gauges.get("running", 0)),
        waiting=int(gauges.get("waiting", 0)),
        produced_tokens=int(gauges.get("produced_tokens", 0)),
        kv_used_tokens=int(gauges.get("kv_used_tokens", 0)),
        prefilled_tokens=int(gauges.get("prefilled_tokens", 0)),
        stalled=gauges.get("stalled", 0.0) > 0,
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
