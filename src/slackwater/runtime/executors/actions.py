"""Actions, live: the broker's commands become messages to sandbox workers, their answers events.

Messages go out in order (`store/outcomes.py`). An action is logged as started before its worker
gets it, so that a restart never runs an action twice that must not be.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

from slackwater.control.actions import commands, events
from slackwater.control.driver import Driver
from slackwater.model.action import EnvironmentSpec, GpuService, OutcomeKind, WorkerCapacity
from slackwater.model.ids import (
    ActionId,
    EnvironmentId,
    JobId,
    NodeId,
    ServiceName,
    WorkerId,
)
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.services.action_table import ActionTable
from slackwater.runtime.store import action_log as log
from slackwater.runtime.store.outcomes import WriteAhead
from slackwater.wire import messages, rewards, sandbox
from slackwater.wire.frames import Frame, FrameKind

logger = logging.getLogger(__name__)

_KINDS = {
    "exited": OutcomeKind.DONE,
    "wall": OutcomeKind.TIMED_OUT,
}


@dataclass(slots=True)
class _Attempt:
    """What a worker has reported about one attempt."""

    action: ActionId
    output: dict[sandbox.Stream, bytearray] = field(
        default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()}
    )
    over: sandbox.ActionFinished | None = None


class ActionExecutor:
    """One broker, all sandbox workers; with `needs_isolation`, those that isolate tenants."""

    def __init__(
        self,
        hub: WorkerHub,
        ahead: WriteAhead,
        driver: Driver[events.Event, commands.Command],
        table: ActionTable,
        *,
        needs_isolation: bool,
    ) -> None:
        self._hub = hub
        self._ahead = ahead
        self._needs_isolation = needs_isolation
        self._table = table
        driver.register(self._execute, get_args(commands.Command))
        self.feed, self.close = driver.feed, driver.close
        self._attempts: dict[int, _Attempt] = {}
        self._latest: dict[ActionId, int] = {}
        self._workers: dict[NodeId, WorkerId] = {}
        self.reward_facts: dict[WorkerId, rewards.RewardFacts] = {}
        self.services: set[ServiceName] = set()
        self.facts: dict[WorkerId, sandbox.SandboxFacts] = {}
        self.gauges: dict[WorkerId, dict[str, float]] = {}
        self._marked: set[ActionId] = set()
        self._snapshots: dict[int, asyncio.Future[sandbox.SnapshotKept]] = {}
        self._snapshot_number = 0

    # ---- for the hub ----
    def worker_joined(self, worker: WorkerId, facts: sandbox.SandboxFacts) -> None:
        if self._needs_isolation and not facts.isolates:
            logger.error(
                "sandbox worker=%s node=%s gets no actions: its backend %s does not isolate "
                "tenants; install bubblewrap there, or state --trust-tenants",
                worker,
                facts.node,
                facts.backend,
            )
            return
        node = NodeId(facts.node)
        self._workers[node] = worker
        self.facts[worker] = facts
        for line in facts.said:
            logger.info("sandbox worker=%s %s", worker, line)
        environments = tuple(
            EnvironmentSpec(EnvironmentId(found.environment), JobId(found.job), found.memory_mib)
            for found in facts.environments
        )
        cores = tuple(tuple(numa) for numa in facts.cores)
        capacity = WorkerCapacity(cores=cores, memory_mib=facts.memory_mib)
        self.feed(events.WorkerJoined(loop_time(), node, capacity, environments))
        for spec in environments:
            self._table.record_ready(spec.environment)

    def rewards_joined(self, worker: WorkerId, facts: rewards.RewardFacts) -> None:
        """A reward worker has joined, with devices and with services in host memory."""
        node = NodeId(facts.node)
        self._workers[node] = worker
        self.reward_facts[worker] = facts
        for name, reason in facts.failed.items():
            logger.warning("reward model failed worker=%s service=%s: %s", worker, name, reason)
        for service in facts.services:
            self.declare(service)
            self._table.save_service(service)
        capacity = WorkerCapacity(gpus=len(facts.devices), gpu_mib=facts.device_mib)
        self.feed(events.WorkerJoined(loop_time(), node, capacity))

    def failure_of(self, service: ServiceName) -> str | None:
        """Why no present worker could stage a service; None if one has it, or none tried."""
        joined = self.reward_facts.values()
        if any(service == staged.service for facts in joined for staged in facts.services):
            return None
        reasons = (facts.failed[service] for facts in joined if service in facts.failed)
        return next(reasons, None)

    def declare(self, service: GpuService) -> None:
        """Tell the broker of a reward service that exists, or existed before a restart."""
        self.services.add(service.service)
        self.feed(events.ServiceDeclared(loop_time(), service))

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        self.gauges.pop(worker, None)
        facts = self.facts.pop(worker, None) or self.reward_facts.pop(worker, None)
        if facts is not None and self._workers.get(NodeId(facts.node)) == worker:
            node = NodeId(facts.node)
            del self._workers[node]
            self.feed(events.WorkerLost(loop_time(), node, reason))

    def handle_frame(self, worker: WorkerId, frame: Frame) -> None:
        if frame.kind is not FrameKind.CONTROL:
            logger.warning("not from a sandbox frame=%s", frame.kind.name)
            return
        match messages.decode_from_worker(frame.body):
            case messages.Heartbeat(gauges):
                self.gauges[worker] = gauges
            case sandbox.ActionPrinted(attempt, stream, data):
                self._append_output(attempt, stream, data)
            case sandbox.ActionFinished() as over:
                self._end_attempt(over)
            case sandbox.EnvironmentReady(environment):
                self.feed(events.EnvironmentOpened(loop_time(), EnvironmentId(environment)))
                self._table.record_ready(EnvironmentId(environment))
            case sandbox.EnvironmentFailed(environment, reason):
                self.feed(events.EnvironmentLost(loop_time(), EnvironmentId(environment), reason))
            case sandbox.SnapshotKept(request) as kept:
                waiting = self._snapshots.pop(request, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(kept)
            case other:
                logger.warning("not from a sandbox message=%s", type(other).__name__)

    def _append_output(self, attempt: int, stream: sandbox.Stream, data: bytes) -> None:
        record = self._attempts.get(attempt)
        if record is not None:
            record.output[stream] += data
            self._table.append_output(record.action, stream, data)

    def _end_attempt(self, over: sandbox.ActionFinished) -> None:
        record = self._attempts.get(over.attempt)
        if record is None:
            return
        record.over = over
        kind = _KINDS.get(over.end, OutcomeKind.FAILED)
        self.finish_attempt(record.action, over.attempt, kind, over.run_s, over.reason)

    def finish_attempt(
        self, action: ActionId, attempt: int, kind: OutcomeKind, ran_s: float, reason: str = ""
    ) -> None:
        """An attempt has ended: report it to the broker."""
        self.feed(events.ActionFinished(loop_time(), action, attempt, kind, ran_s, reason))
        self._attempts.pop(attempt, None)

    # ---- the broker ----
    def _execute(self, command: commands.Command) -> None:
        match command:
            case commands.StartAction():
                self._start(command)
            case commands.StopAction(node, _, attempt, reason) if node is not None:
                self._post(node, sandbox.StopAction(attempt, reason))
            case commands.StopAction(_, action, attempt, reason):
                self.finish_attempt(action, attempt, OutcomeKind.FAILED, 0.0, reason)
            case commands.EndAction():
                self._end(command)
            case commands.OpenEnvironment(node, spec):
                self._open_environment(node, spec)
            case commands.CloseEnvironment(node, environment):
                self._post(node, sandbox.CloseEnvironment(environment))
            case commands.EndEnvironment(environment, reason):
                self._table.end_environment(environment, reason)
            case commands.EvictService(node, gpus, service):
                self._post(node, rewards.EvictService(service, list(gpus)))
            case commands.RestoreService(node, gpus, service):
                self._post(node, rewards.RestoreService(service, list(gpus)))

    def _start(self, command: commands.StartAction) -> None:
        action, grant = command.spec.action, command.grant
        request = self._table.actions[action].request
        self._attempts[command.attempt] = _Attempt(action)
        self._latest[action] = command.attempt
        self._table.record_grant(action, command.attempt)
        if grant.node is None:
            return  # a permit: its owner says when it is over
        service = command.spec.service
        if service is not None:
            score = rewards.ScoreTokens(command.attempt, service, list(grant.gpus), request.stdin)
            self._post(grant.node, score, starts=action)
            return
        message = sandbox.RunAction(
            attempt=command.attempt,
            command=request.command,
            cores=list(grant.cores),
            limits=request.limits,
            environment=command.spec.environment,
            variables=request.variables,
            stdin=request.stdin,
            stream=request.stream,
        )
        self._post(grant.node, message, starts=action)

    def _open_environment(self, node: NodeId, spec: EnvironmentSpec) -> None:
        request = self._table.environments[spec.environment].request
        message = sandbox.OpenEnvironment(
            environment=spec.environment,
            job=spec.job,
            memory_mib=spec.memory_mib,
            snapshot=self._table.snapshot_of(spec.environment),
            files=request.files,
        )
        self._post(node, message)

    def _end(self, command: commands.EndAction) -> None:
        outcome = command.outcome
        attempt = self._latest.pop(command.action, None)
        record = None if attempt is None else self._attempts.get(attempt)
        over = None if record is None else record.over
        grant = outcome.grant
        output = record.output if record is not None else {"stdout": b"", "stderr": b""}
        result = log.ActionResult(
            kind=outcome.kind.value,
            reason=outcome.reason,
            stdout=bytes(output["stdout"]),
            stderr=bytes(output["stderr"]),
            queued_s=outcome.queued_s,
            ran_s=outcome.ran_s,
            cores=[] if grant is None else list(grant.cores),
            node=None if grant is None else grant.node,
            end=None if over is None else over.end,
            status=None if over is None else over.status,
            launch_s=0.0 if over is None else over.launch_s,
            cpu_s=0.0 if over is None else over.cpu_s,
            max_rss_bytes=0 if over is None else over.max_rss_bytes,
        )
        self._table.record_result(command.action, result)

    def mark_started(self, action: ActionId, marked: bool = True) -> None:
        """Note whether the log has the action as started, so that `_post` need not write it."""
        if marked:
            self._marked.add(action)
        else:
            self._marked.discard(action)

    # ---- to workers ----
    def _post(
        self, node: NodeId, message: messages.Message, starts: ActionId | None = None
    ) -> None:
        if starts in self._marked:
            self._marked.remove(starts)
            starts = None
        worker = self._workers.get(node)
        if worker is None:
            return  # the broker knows, or will know, that the worker is lost
        mark = None if starts is None else partial(log.mark_started, names=[starts])
        self._ahead.then(partial(self._hub.send, worker, message), mark)

    async def keep_snapshot(
        self, node: NodeId, environment: EnvironmentId, name: str, most_bytes: int
    ) -> sandbox.SnapshotKept:
        self._snapshot_number += 1
        number = self._snapshot_number
        waiting: asyncio.Future[sandbox.SnapshotKept] = asyncio.get_running_loop().create_future()
        self._snapshots[number] = waiting
        self._post(node, sandbox.KeepSnapshot(number, environment, name, most_bytes))
        try:
            async with asyncio.timeout(60.0):
                return await waiting
        except TimeoutError:
            return sandbox.SnapshotKept(number, "its worker did not answer")
        finally:
            self._snapshots.pop(number, None)

    def nodes(self) -> Sequence[NodeId]:
        return sorted(self._workers)
