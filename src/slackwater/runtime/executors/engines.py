"""Sends the controller's commands to engines as messages, and feeds it their frames as events."""

import dataclasses
import logging
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TypeAlias

import numpy as np
from msgspec import structs

from slackwater.control.jobs import commands as job_commands
from slackwater.control.jobs.events import JobAnswered
from slackwater.control.rollout import commands, events
from slackwater.control.steps import commands as step_commands
from slackwater.control.steps.events import EngineRested, LocalEngineUp
from slackwater.control.weights import commands as weight_commands
from slackwater.control.weights import events as weight_events
from slackwater.model.ids import InstanceId, JobId, NodeId, TurnId, WorkerId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.turn import AttemptId, FinishReason, TurnSpec
from slackwater.runtime.executors.recent_trajectories import RecentTrajectories
from slackwater.runtime.executors.relays import RelayExecutor
from slackwater.runtime.executors.serving import ServingExecutor
from slackwater.runtime.executors.trajectory_index import PromptEnd, TrajectoryIndex
from slackwater.runtime.executors.turn_results import TurnListener
from slackwater.runtime.live_driver import FleetDriver, loop_time
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.services.meters import Meters
from slackwater.runtime.services.slo_tracker import SloTracker
from slackwater.wire import messages
from slackwater.wire.frames import Frame, FrameKind
from slackwater.wire.lending import BudgetReport, LoanEnded
from slackwater.wire.tokens import decode_tokens

logger = logging.getLogger(__name__)

_REASONS = {reason.value: reason for reason in FinishReason}
_MAX_HELD_BYTES = 8 * messages.MAX_HELD_TOKENS + 1024 * messages.MAX_HELD_TURNS  # of an engine

InstanceCommand: TypeAlias = (  # that becomes a message to the instance
    commands.DispatchTurn
    | commands.AbortTurn
    | weight_commands.PullVersion
    | weight_commands.DropVersion
)
OtherCommand: TypeAlias = (
    commands.ReleaseInstance
    | commands.ReportFault
    | commands.EndSeeding
    | commands.ResumeSeeding
    | commands.LimitInstances
    | step_commands.StartEngine
    | step_commands.RestEngine
    | weight_commands.DeleteVersion
    | job_commands.PlaceJob
)
TurnReport: TypeAlias = (
    commands.AppendTokens | commands.StreamTokens | commands.CompleteTurn | commands.FailTurn
)
EngineCommand: TypeAlias = TurnReport | InstanceCommand | OtherCommand


@dataclasses.dataclass(slots=True)
class _OpenTurn:
    """A turn that has not ended. `has_streamed`: its first tokens were passed on."""

    spec: TurnSpec
    listener: TurnListener
    prompt_end: PromptEnd
    since_s: float
    has_streamed: bool = False


class EngineExecutor:
    """All engines of a service, and the listeners of their turns."""

    def __init__(
        self,
        driver: FleetDriver,
        hub: WorkerHub,
        *,
        release: Callable[[WorkerId], None],
        delete_version: Callable[[str], None] = lambda version: None,
        find_place: Callable[[WorkerId], NodeId | None] = lambda worker: None,
        turns_returned: Callable[[WorkerId], None] = lambda worker: None,
        meters: Meters | None = None,
        lending: ServingExecutor | None = None,
        slo: SloTracker | None = None,
    ) -> None:
        """`release` ends an engine's process, `delete_version` removes a version from the store,
        `find_place` gives the co-scheduler's place of a worker. `turns_returned` is called when an
        engine has reported the turns that it still has from an earlier control plane.
        """
        self._release, self._delete_version = release, delete_version
        self._find_place, self._turns_returned = find_place, turns_returned
        self._meters = meters or Meters()
        self._hub = hub
        self.feed = driver.feed
        self._open: dict[TurnId, _OpenTurn] = {}
        self._trajectories = TrajectoryIndex()
        self.recent = RecentTrajectories()
        self.relays = RelayExecutor(hub, driver)
        self.gauges: dict[WorkerId, dict[str, float]] = {}
        self._returned_turns: dict[TurnId, messages.HeldTurn] | None = {}
        self._reported: set[WorkerId] = set()  # engines that have reported their turns
        self._topk: dict[WorkerId, list[list[tuple[int, float]]]] = {}
        self.lending = lending
        self.slo = slo
        driver.register(self._complete, (commands.CompleteTurn,))
        driver.register(self._append, (commands.AppendTokens,))
        driver.register(self._stream, (commands.StreamTokens,))
        driver.register(self._fail, (commands.FailTurn,))
        driver.register(self._send, InstanceCommand.__args__)
        driver.register(self._execute, OtherCommand.__args__)

    # ---- for the service ----
    def submit(
        self,
        spec: TurnSpec,
        listener: TurnListener,
        arrived_s: float | None = None,
        returned: messages.HeldTurn | None = None,
    ) -> None:
        """Generate a turn; it joins the trajectory that its prompt continues, if any.

        `arrived_s`: when the user's request came, if a user waits for the first token. `returned`:
        what an engine generated of the turn for an earlier control plane.
        """
        known, prompt_end = self._trajectories.find_continued(spec.version, spec.prompt)
        if known is not None:
            spec = dataclasses.replace(spec, trajectory=known)
        now_s = loop_time()
        since_s = now_s if arrived_s is None else arrived_s
        slo, waits = self.slo, arrived_s is not None
        if slo is not None and waits and spec.base_model == slo.model:
            spec = dataclasses.replace(spec, stream=True)  # so that its first token is seen
            slo.record_arrival(spec.turn, since_s, len(spec.prompt))
        self._open[spec.turn] = _OpenTurn(spec, listener, prompt_end, since_s)
        if returned is None or not _is_believable(returned, spec):
            self.feed(events.TurnSubmitted(now_s, spec))
            return
        tokens = np.frombuffer(returned.tokens, "<u4").tolist()
        logprobs = np.frombuffer(returned.logprobs, "<f4").tolist()
        self.feed(events.TurnSubmitted(now_s, spec, tokens, logprobs))

    def take_returned_turns(self) -> dict[TurnId, messages.HeldTurn]:
        """What engines generated for an earlier control plane; later reports are ignored."""
        turns, self._returned_turns = self._returned_turns, None
        self._reported.clear()
        return turns or {}

    def cancel(self, turn: TurnId) -> None:
        """Cancel a turn; its listener is not called any more."""
        if (open_turn := self._open.pop(turn, None)) is not None:
            now_s = loop_time()
            self._meters.record_turn(open_turn.spec, now_s - open_turn.since_s, 0, "cancelled")
            if self.slo is not None:
                self.slo.record_cancel(turn, now_s)
            self.feed(events.TurnCancelled(now_s, turn))

    def publish(
        self,
        version: str,
        base_model: str,
        job: JobId | None = None,
        *,
        line: str = "",
        adapter: bool = False,
        sampled: bool = True,
    ) -> None:
        """Announce a version that engines can pull; see `WeightsPublished`."""
        self.feed(
            weight_events.WeightsPublished(
                loop_time(), job, version, base_model, line=line, adapter=adapter, sampled=sampled
            )
        )

    def retire(self, version: str) -> None:
        """Retire a version that nothing names; it is deleted when no engine needs it."""
        self.feed(weight_events.WeightsRetired(loop_time(), version))

    def give_notice(self, instance: InstanceId, leaves_in_s: float) -> None:
        """Announce that an instance will be taken away: its turns move now."""
        now_s = loop_time()
        self.feed(events.InstanceNotice(now_s, instance, now_s + leaves_in_s))

    def drain(self, instance: InstanceId, move_turns: bool) -> None:
        """Drain an instance: it gets no more turns, and is released when it has none."""
        self.feed(events.DrainRequested(loop_time(), instance, move_turns))

    def count_live_turns(self) -> int:
        return len(self._open)

    # ---- for the hub ----
    def engine_joined(self, worker: WorkerId, facts: messages.EngineFacts) -> None:
        if self.lending is not None:
            self.lending.add_worker(worker, facts)
        declared = structs.asdict(facts) | {"kind": InstanceKind(facts.kind)}
        del declared["lends"]
        declared["node"] = facts.node or None
        place = self._find_place(worker)
        spec = InstanceSpec(instance=InstanceId(worker), place=place, **declared)
        local = spec.kind is InstanceKind.LOCAL
        self.feed(
            LocalEngineUp(loop_time(), spec) if local else events.InstanceJoined(loop_time(), spec)
        )

    def engine_lost(self, worker: WorkerId, reason: str) -> None:
        self._topk.pop(worker, None)
        self.gauges.pop(worker, None)
        if self.lending is not None:
            self.lending.remove_worker(worker)
        self.feed(events.InstanceLost(loop_time(), InstanceId(worker), reason))

    def handle_frame(self, worker: WorkerId, frame: Frame) -> None:
        """Handle one frame; token frames, the most frequent, are decoded directly."""
        now_s, instance = loop_time(), InstanceId(worker)
        if frame.kind is FrameKind.TOKENS:
            attempts, tokens, scores, counts, finished = decode_tokens(frame.body)
            if attempts:
                columns = attempts, tokens, scores, counts
                others = self._topk.pop(worker, ())
                self.feed(events.TokensArrived(now_s, instance, *columns, topk=others))
            for turn in finished:
                attempt, why = AttemptId(turn.request), _REASONS[turn.reason]
                ended = attempt, why, turn.total_tokens, turn.version
                self.feed(events.TurnEnded(now_s, instance, *ended))
            return
        match messages.decode_from_worker(frame.body):
            case messages.GenerateRefused(request, error, at_fault):
                attempt = AttemptId(request)
                self.feed(events.TurnRefused(now_s, instance, attempt, error, at_fault))
            case messages.PromptScores(request, logprobs, topk, targets, drawn):
                attempt = AttemptId(request)
                self.feed(
                    events.PromptScored(now_s, instance, attempt, logprobs, topk, targets, drawn)
                )
            case messages.SampledTopK(rows):
                self._topk[worker] = rows
            case messages.HeldTurns(turns):
                self._store_returned_turns(worker, turns)
                self._turns_returned(worker)
            case messages.VersionReady(version, kept):
                self.feed(weight_events.InstanceReady(now_s, instance, version, kept))
            case messages.VersionFailed(version, error):
                self.feed(weight_events.PullFailed(now_s, instance, version, error))
            case messages.EngineRested(number):
                self.feed(EngineRested(now_s, instance, number))
            case messages.Heartbeat() | BudgetReport() | LoanEnded() as said:
                self._handle_status(now_s, worker, said)
            case other:
                logger.warning("not from an engine message=%s", type(other).__name__)

    def _store_returned_turns(self, worker: WorkerId, turns: Sequence[messages.HeldTurn]) -> None:
        """Keep the longest part of each turn, within the limits of what one engine may report."""
        if self._returned_turns is None or worker in self._reported:
            return
        self._reported.add(worker)
        left_bytes = _MAX_HELD_BYTES
        for turn in turns[: messages.MAX_HELD_TURNS]:
            left_bytes -= len(turn.tokens) + len(turn.logprobs) + len(turn.turn + turn.version)
            if left_bytes < 0:
                return
            other = self._returned_turns.get(TurnId(turn.turn))
            more = other is None or len(turn.tokens) > len(other.tokens)
            if more and len(turn.tokens) == len(turn.logprobs) and len(turn.tokens) % 4 == 0:
                self._returned_turns[TurnId(turn.turn)] = turn

    def _handle_status(
        self, now_s: float, worker: WorkerId, message: messages.Heartbeat | BudgetReport | LoanEnded
    ) -> None:
        instance = InstanceId(worker)
        match message:
            case messages.Heartbeat(gauges):
                self.gauges[worker] = gauges
                self.feed(_heartbeat(now_s, instance, gauges))
                if self.lending is not None:
                    self.lending.record_heartbeat(worker, gauges)
            case BudgetReport(max_running, kv_tokens):
                self.feed(events.BudgetChanged(now_s, instance, max_running, kv_tokens))
            case LoanEnded(error):
                if self.lending is not None:
                    self.lending.end_loan(worker, error)

    # ---- commands ----
    def _send(self, command: InstanceCommand) -> None:
        self._hub.send(WorkerId(command.instance), _message(command))

    def _execute(self, command: OtherCommand) -> None:
        match command:
            case commands.ReleaseInstance(instance, reason):
                logger.warning("engine released instance=%s reason=%s", instance, reason)
                self._release(WorkerId(instance))
            case step_commands.StartEngine(spec):
                if spec.sleeps:  # turns that it gets before it is awake wait there
                    self._hub.send(WorkerId(spec.instance), messages.WakeEngine())
                self.feed(events.InstanceJoined(loop_time(), spec))
            case step_commands.RestEngine(instance, reason, number):
                logger.info("engine rests instance=%s reason=%s", instance, reason)
                if number is not None:
                    self._hub.send(WorkerId(instance), messages.RestEngine(number))
            case weight_commands.DeleteVersion(version):
                self._delete_version(version)
            case job_commands.PlaceJob(job):
                # Every job shares the service's engines and trainers.
                self.feed(JobAnswered(loop_time(), job, "placed", "shares what the service has"))
            case commands.ReportFault(instance, what):
                logger.warning("engine fault instance=%s what=%s", instance, what)
            case commands.EndSeeding(job, reason):
                logger.info("seeding ended job=%s reason=%s", job, reason)
            case commands.ResumeSeeding(job, reason):
                logger.info("seeding resumed job=%s reason=%s", job, reason)
            case commands.LimitInstances(job, most):
                logger.info("more would not help job=%s most=%d", job, most)

    def _stream(self, command: commands.StreamTokens) -> None:
        turns, start = self._open, 0
        tokens, logprobs = command.tokens, command.logprobs
        for turn, count in zip(command.turns, command.counts or repeat(1), strict=False):
            end = start + count
            if (open_turn := turns.get(turn)) is not None:
                open_turn.listener.stream(tokens[start:end], logprobs[start:end])
            start = end

    def _append(self, command: commands.AppendTokens) -> None:
        turn = self._open.get(command.turn)
        if turn is None:
            return
        if not turn.has_streamed:
            turn.has_streamed, now_s = True, loop_time()
            self._meters.record_first_token(turn.spec, now_s - turn.since_s)
            if self.slo is not None:
                self.slo.record_first_token(command.turn, now_s)
        turn.listener.append(command)

    def _complete(self, command: commands.CompleteTurn) -> None:
        turn = self._open.pop(command.turn, None)
        if turn is None:
            return
        spec, tokens, now_s = turn.spec, command.tokens, loop_time()
        self._meters.record_turn(spec, now_s - turn.since_s, len(tokens), "completed")
        if self.slo is not None:
            self.slo.record_answer(spec.turn, now_s, len(tokens))
        self._trajectories.record_turn(turn.prompt_end, tokens, spec.trajectory, now_s)
        self.recent.record_turn(spec, command, turn.since_s, now_s)
        turn.listener.complete(command)

    def _fail(self, command: commands.FailTurn) -> None:
        turn = self._open.pop(command.turn, None)
        if turn is None:
            return
        now_s = loop_time()
        self._meters.record_turn(turn.spec, now_s - turn.since_s, 0, "failed")
        if self.slo is not None:
            self.slo.record_failure(command.turn, now_s)
        turn.listener.fail(command.error)


def _message(command: InstanceCommand) -> messages.Message:
    match command:
        case commands.DispatchTurn():
            return messages.Generate(
                command.attempt,
                command.version,
                array("I", command.prompt).tobytes(),
                array("I", command.generated).tobytes(),
                command.sampling,
                command.score_prompt,
                command.owner,
                command.turn,
                array("f", command.logprobs).tobytes(),
                command.stream,
            )
        case commands.AbortTurn(_, attempt):
            return messages.Abort(attempt)
        case weight_commands.PullVersion(_, version, way, keep):
            return messages.PullVersion(version, tuple(way), keep)
        case weight_commands.DropVersion(_, version):
            return messages.DropVersion(version)


def _heartbeat(
    now_s: float, instance: InstanceId, gauges: dict[str, float]
) -> events.InstanceHeartbeat:
    return events.InstanceHeartbeat(
        now_s,
        instance,
        running=int(gauges.get("running", 0)),
        waiting=int(gauges.get("waiting", 0)),
        produced_tokens=int(gauges.get("produced_tokens", 0)),
        kv_used_tokens=int(gauges.get("kv_used_tokens", 0)),
        prefilled_tokens=int(gauges.get("prefilled_tokens", 0)),
        stalled=gauges.get("stalled", 0.0) > 0,
    )


def _is_believable(returned: messages.HeldTurn, spec: TurnSpec) -> bool:
    """Whether an engine can have generated these tokens of the turn."""
    scores = np.frombuffer(returned.logprobs, "<f4")
    fits = len(scores) <= spec.sampling.max_tokens
    return returned.version == spec.version and fits and bool(np.isfinite(scores).all())
