"""Turns, live: the rollout manager's commands become messages to engines, their frames its events."""

import asyncio
import dataclasses
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from slackwater.control.controller import Controller
from slackwater.control.rollout import commands as do
from slackwater.control.rollout import events as on
from slackwater.model.ids import InstanceId, JobId, TenantId, TurnId, WorkerId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.turn import AttemptId, FinishReason, TurnSpec
from slackwater.runtime.bodies.lent_trainers import LentTrainers
from slackwater.runtime.bodies.timers import Timers
from slackwater.runtime.bodies.trajectory_index import TrajectoryIndex
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import messages
from slackwater.wire.frames import Frame, FrameKind
from slackwater.wire.tokens import TokenColumns, decode_tokens

logger = logging.getLogger(__name__)

TurnResult: TypeAlias = do.CompleteTurn  # what the service is given of a turn
TurnTokens: TypeAlias = do.AppendTokens  # and of one that streams


class TurnListener(Protocol):
    """Who is told how a turn goes."""

    def appended(self, more: do.AppendTokens) -> None: ...
    def completed(self, result: TurnResult) -> None: ...
    def failed(self, error: str) -> None: ...


class RolloutBody:
    """One rollout manager, all engines."""

    def __init__(
        self,
        hub: WorkerHub,
        manager: Controller[on.RolloutEvent, do.RolloutCommand],
        release: Callable[[WorkerId], None],
    ) -> None:
        self._hub = hub
        self._manager = manager
        self._release = release
        self._timers = Timers(lambda name: self._feed(on.TimerFired(_now_s(), name)))
        self._listeners: dict[TurnId, TurnListener] = {}
        self._specs: dict[TurnId, TurnSpec] = {}
        self._trajectories = TrajectoryIndex()
        self.lent = LentTrainers(self._feed, self._join)
        self._pulled: dict[WorkerId, set[str]] = {}
        self.gauges: dict[WorkerId, dict[str, float]] = {}
        self._topk: dict[WorkerId, list[list[tuple[int, float]]]] = {}

    # ---- for the service ----
    def submit(self, spec: TurnSpec, listener: TurnListener) -> None:
        """Have a turn generated; it belongs to the trajectory that its prompt continues, if any."""
        known = self._trajectories.continued_by(spec.version, spec.prompt)
        if known is not None:
            spec = dataclasses.replace(spec, trajectory=known)
        self._listeners[spec.turn] = listener
        self._specs[spec.turn] = spec
        self._feed(on.TurnSubmitted(_now_s(), spec))
        self.lent.turn_submitted(spec.job)

    def cancel(self, turn: TurnId) -> None:
        """The client does not want it any more; its listener hears nothing more."""
        if self._listeners.pop(turn, None) is not None:
            self.lent.turn_ended(self._specs.pop(turn).job, 0)
            self._feed(on.TurnCancelled(_now_s(), turn))

    def name_owners(self, tenants: Sequence[str]) -> None:
        """Whose turns may come."""
        self._feed(on.OwnersNamed(_now_s(), tuple(TenantId(name) for name in tenants)))

    def published(self, job: str, version: str) -> None:
        self._feed(on.WeightsPublished(_now_s(), JobId(job), version))

    def retired(self, version: str) -> None:
        self._feed(on.WeightsRetired(_now_s(), version))

    def notice(self, instance: InstanceId, leaves_in_s: float) -> None:
        """It will be taken away: its turns move now."""
        now_s = _now_s()
        self._feed(on.InstanceNotice(now_s, instance, now_s + leaves_in_s))

    def drain(self, instance: InstanceId, move_turns: bool) -> None:
        """It takes no more turns, and is released once it has none."""
        self._feed(on.DrainAsked(_now_s(), instance, move_turns))

    def live(self) -> int:
        """How many turns are under way."""
        return len(self._listeners)

    def close(self) -> None:
        self._timers.cancel_all()
        self.lent.close()

    # ---- for the hub ----
    def engine_joined(self, worker: WorkerId, facts: messages.EngineFacts) -> None:
        if InstanceKind(facts.kind) is InstanceKind.LOCAL:
            self.lent.engine_joined(worker, facts)
        else:
            self._join(worker, facts)

    def _join(self, worker: WorkerId, facts: messages.EngineFacts) -> None:
        spec = InstanceSpec(
            instance=InstanceId(worker),
            kind=InstanceKind(facts.kind),
            max_running=facts.max_running,
            max_context_tokens=facts.max_context_tokens,
            kv_tokens=facts.kv_tokens,
            max_versions=facts.max_versions,
            exact_continuation=facts.exact_continuation,
            job=JobId(facts.base_model),
        )
        self._feed(on.InstanceJoined(_now_s(), spec))

    def engine_lost(self, worker: WorkerId, reason: str) -> None:
        self._topk.pop(worker, None)
        self.gauges.pop(worker, None)
        self._pulled.pop(worker, None)
        self.lent.engine_lost(worker)
        self._feed(on.InstanceLost(_now_s(), InstanceId(worker), reason))

    def engine_said(self, worker: WorkerId, frame: Frame) -> None:
        """One frame; token frames go the short way."""
        if self.lent.keeps(worker):
            return  # of turns that have moved on
        now_s, instance = _now_s(), InstanceId(worker)
        if frame.kind is FrameKind.TOKENS:
            self._feed(self._tokens(now_s, worker, decode_tokens(frame.body)))
            return
        match messages.decode_from_worker(frame.body):
            case messages.Ended(request, reason, total_tokens, version):
                attempt, why = AttemptId(request), FinishReason(reason)
                self._feed(on.TurnEnded(now_s, instance, attempt, why, total_tokens, version))
            case messages.GenerateRefused(request, error, at_fault):
                attempt = AttemptId(request)
                self._feed(on.TurnRefused(now_s, instance, attempt, error, at_fault))
            case messages.PromptScores(request, logprobs, topk):
                attempt = AttemptId(request)
                self._feed(on.PromptScored(now_s, instance, attempt, logprobs, topk))
            case messages.SampledTopK(rows):
                self._topk[worker] = rows
            case messages.VersionReady(version):
                self._feed(on.InstanceReady(now_s, instance, version))
            case messages.VersionFailed(version, error):
                self._feed(on.PullFailed(now_s, instance, version, error))
            case messages.Heartbeat(gauges):
                self.gauges[worker] = gauges
                self._feed(_heartbeat(now_s, instance, gauges))
            case other:
                logger.warning("not from an engine message=%s", type(other).__name__)

    def _tokens(self, now_s: float, worker: WorkerId, columns: TokenColumns) -> on.TokensArrived:
        """Columns stay columns all the way into the manager's books."""
        return on.TokensArrived(
            now_s,
            InstanceId(worker),
            array("I", columns.requests.astype(np.uintc, copy=False).tobytes()),
            array("I", columns.tokens.astype(np.uintc, copy=False).tobytes()),
            array("d", columns.logprobs.astype(np.float64).tobytes()),
            topk=self._topk.pop(worker, ()),
        )

    # ---- commands ----
    def _feed(self, event: on.RolloutEvent) -> None:
        for command in self._manager.handle(event):
            self._apply(command)

    def _apply(self, command: do.RolloutCommand) -> None:
        match command:
            case do.AppendTokens() | do.CompleteTurn() | do.FailTurn():
                self._tell(command)
            case do.SetTimer(name, at_s):
                self._timers.set(name, at_s)
            case do.ReleaseInstance(instance, reason):
                self._let_go(WorkerId(instance), reason)
            case do.ReportFault(instance, what):
                logger.warning("engine fault instance=%s what=%s", instance, what)
            case do.EndSeeding(job, reason):
                self.lent.end_seeding(job, reason)
            case do.ResumeSeeding(job, reason):
                self.lent.resume_seeding(job, reason)
            case do.LimitInstances(job, most):
                logger.info("more instances would not help job=%s most=%d", job, most)
            case _:
                worker = WorkerId(command.instance)
                if isinstance(command, do.PullWeights) and self.lent.has(worker):
                    self._pulled.setdefault(worker, set()).add(command.version)
                self._hub.send(worker, _message(command))

    def _let_go(self, worker: WorkerId, reason: str) -> None:
        """A local engine rests with no weights but its base's; any other ends."""
        self.lent.released(worker)
        if not self.lent.has(worker):
            logger.warning("engine released instance=%s reason=%s", worker, reason)
            self._release(worker)
            return
        for version in self._pulled.pop(worker, ()):
            self._hub.send(worker, messages.DropVersion(version))

    def _tell(self, command: do.AppendTokens | do.CompleteTurn | do.FailTurn) -> None:
        if isinstance(command, do.AppendTokens):
            if (listener := self._listeners.get(command.turn)) is not None:
                listener.appended(command)
            return
        listener = self._listeners.pop(command.turn, None)
        if listener is None:
            return
        spec = self._specs.pop(command.turn)
        tokens = command.tokens if isinstance(command, do.CompleteTurn) else ()
        self.lent.turn_ended(spec.job, len(tokens))
        if isinstance(command, do.CompleteTurn):
            self._trajectories.ended(spec.version, spec.prompt, tokens, spec.trajectory)
            listener.completed(command)
        else:
            listener.failed(command.error)


def _message(
    command: do.Dispatch | do.AbortOn | do.PullWeights | do.DropVersion,
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
            )
        case do.AbortOn(_, attempt):
            return messages.Abort(attempt)
        case do.PullWeights(_, version):
            return messages.PullVersion(version)
        case do.DropVersion(_, version):
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
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
