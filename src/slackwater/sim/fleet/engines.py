"""Engines of a simulated fleet: they pull weights, run turns and send tokens.

A turn's tokens are known in advance and checked when it completes. Every node has an engine that
serves all jobs, as in a service; borrowed ones join and leave.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from slackwater.control.rollout import commands as rollout_commands
from slackwater.control.rollout import events
from slackwater.control.weights import commands as weight_commands
from slackwater.control.weights.events import InstanceReady, PullFailed
from slackwater.model.ids import InstanceId, JobId, NodeId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.placement import is_within
from slackwater.model.turn import FinishReason
from slackwater.sim.fleet.clients import SimulatedClients
from slackwater.sim.fleet.context import FleetContext
from slackwater.sim.fleet.job import BASE_MODEL
from slackwater.sim.rollout.storm_instance import StormInstance, StormRequest

BEAT_S = 48.0

EngineCommand: TypeAlias = (
    rollout_commands.DispatchTurn
    | rollout_commands.AbortTurn
    | rollout_commands.ReleaseInstance
    | weight_commands.PullVersion
    | weight_commands.DropVersion
    | weight_commands.DeleteVersion
)


class SimulatedEngines:
    """`node_of` is where an instance runs; a released one is started again on its node."""

    def __init__(self, fleet: FleetContext, clients: SimulatedClients) -> None:
        self._fleet, self._clients = fleet, clients
        self.living: dict[InstanceId, StormInstance] = {}
        self.node_of: dict[InstanceId, NodeId] = {}
        self.pulls = 0
        self._starts = 0
        self._framed: set[tuple[InstanceId, int, JobId]] = set()

    def execute(self, command: EngineCommand) -> None:
        match command:
            case rollout_commands.DispatchTurn(instance):
                self._reach(instance, partial(self._receive, command))
            case rollout_commands.AbortTurn(instance, attempt):
                self._reach(instance, partial(self._forget, instance, attempt))
            case rollout_commands.ReleaseInstance(instance):
                self.end(instance)
            case weight_commands.PullVersion(instance, version):
                deleted = version in self._fleet.deleted_versions
                assert not deleted, f"{instance} pulls {version}, which is deleted"
                self.pulls += 1
                after_s = self._fleet.costs.pull_s
                self._reach(instance, partial(self._finish_pull, instance, version), after_s)
            case weight_commands.DropVersion(instance, version):
                self._reach(instance, partial(self._drop, instance, version))
            case weight_commands.DeleteVersion(version):
                self._fleet.deleted_versions.add(version)

    # ---- processes ----
    def start(self, node: NodeId) -> None:
        """Start the node's engine, without weights."""
        self._fleet.record_start(node, "engine")
        self._starts += 1
        name = InstanceId(f"{node}/engine/{self._starts}")
        spec = InstanceSpec(
            name,
            InstanceKind.DEDICATED,
            max_running=64,
            max_context_tokens=4096,
            kv_tokens=1 << 20,
            max_versions=4,
            base_model=BASE_MODEL,
            place=node,
        )
        self.join(spec, node)

    def join(self, spec: InstanceSpec, node: NodeId) -> None:
        fleet = self._fleet
        self._starts += 1
        self.node_of[spec.instance] = node
        self.living[spec.instance] = instance = StormInstance(spec, self._starts)
        fleet.tell(events.InstanceJoined(fleet.now_s, spec))
        self._beat(instance)

    def end(self, instance: InstanceId) -> None:
        """End the process; the node's agent starts another once the node is reachable."""
        if self.living.pop(instance, None) is None:
            return
        node = self.node_of[instance]
        if node in self._fleet.places:
            wait_s = self._fleet.silent_s(node) + self._fleet.costs.start_s
            self._fleet.after(wait_s, partial(self.start, node))

    def lose(self, instance: InstanceId, why: str) -> None:
        """Kill the process."""
        self.end(instance)
        self._fleet.tell(events.InstanceLost(self._fleet.now_s, instance, why))

    def lose_node(self, node: NodeId) -> None:
        """Kill the engines of a node."""
        for instance in [name for name in self.living if is_within(self.node_of[name], node)]:
            self.lose(instance, "its node was lost")

    def lives(self, instance: StormInstance) -> bool:
        return self.living.get(instance.instance) is instance

    def _silent_s(self, instance: InstanceId) -> float:
        return self._fleet.silent_s(self.node_of[instance])

    def _reach(
        self, instance: InstanceId, happen: Callable[[], None], after_s: float = 0.0
    ) -> None:
        """Deliver a message once the node is reachable, unless the process has ended."""
        target = self.living.get(instance)

        def deliver() -> None:
            if target is not None and self.lives(target):
                happen()

        self._fleet.after(after_s + self._silent_s(instance), deliver)

    def _beat(self, instance: StormInstance) -> None:
        fleet = self._fleet
        if not self.lives(instance):
            return
        if not self._silent_s(instance.instance):
            load = (len(instance.requests), 0, instance.produced_tokens, instance.kv_used_tokens)
            stalled = instance.says_stalled and fleet.now_s < instance.stalled_until_s
            beat = events.InstanceHeartbeat(fleet.now_s, instance.instance, *load, stalled=stalled)
            fleet.tell(beat)
        fleet.after(BEAT_S, partial(self._beat, instance))

    # ---- weights ----
    def _finish_pull(self, instance: InstanceId, version: str) -> None:
        if self._fleet.chance(self._fleet.broken_pulls):
            self._fleet.tell(PullFailed(self._fleet.now_s, instance, version, "link down"))
            return
        self.living[instance].versions.add(version)
        self._fleet.tell(InstanceReady(self._fleet.now_s, instance, version))

    def _drop(self, instance: InstanceId, version: str) -> None:
        process = self.living[instance]
        used = [r for r in process.requests.values() if r.command.version == version]
        assert not used, f"{instance} drops {version} in use"
        process.versions.discard(version)

    # ---- turns ----
    def _receive(self, command: rollout_commands.DispatchTurn) -> None:
        fleet, instance = self._fleet, self.living[command.instance]
        asked = self._clients.turns.get(command.turn)
        if asked is None:
            return  # its client has left
        if fleet.now_s < instance.refuses_until_s:
            instance_id, attempt = command.instance, command.attempt
            fleet.tell(
                events.TurnRefused(
                    fleet.now_s, instance_id, attempt, "budget cut", turn_at_fault=False
                )
            )
            return
        current = command.attempt in fleet.controller.rollout.dispatcher.attempts
        held = command.version in instance.versions
        assert held or not current, f"{command.turn} dispatched where {command.version} is not"
        request = StormRequest(command, asked.tokens, len(command.generated))
        instance.requests[command.attempt] = request
        job = asked.job.job
        key = (instance.instance, instance.serial, job)
        if key not in self._framed:
            self._framed.add(key)
            fleet.after(self._period_s(job), partial(self._frame, instance, job))

    def _forget(self, instance: InstanceId, attempt: int) -> None:
        self.living[instance].requests.pop(attempt, None)

    def _period_s(self, job: JobId) -> float:
        """The time of a frame: the job's longest rollout has one per token of the longest turn."""
        fleet = self._fleet
        return fleet.jobs[job].lengths.rollout_s / fleet.plan.max_tokens / fleet.pace()

    def _frame(self, instance: StormInstance, job: JobId) -> None:
        """Send a token of every turn of the job on the instance, while it has any."""
        mine = f"{job}."
        requests = {a: r for a, r in instance.requests.items() if r.command.turn.startswith(mine)}
        if not self.lives(instance) or not requests:
            self._framed.discard((instance.instance, instance.serial, job))
            return
        stalled = self._fleet.now_s < instance.stalled_until_s
        if not stalled and not self._silent_s(instance.instance):
            self._step(instance, requests)
        self._fleet.after(self._period_s(job), partial(self._frame, instance, job))

    def _step(self, instance: StormInstance, requests: dict[int, StormRequest]) -> None:
        fleet = self._fleet
        attempts, tokens = [], []
        for attempt, request in requests.items():
            if made := request.next_tokens(1):
                attempts.append(attempt)
                tokens += made
        instance.produced_tokens += len(tokens)
        if attempts:
            scores = [-1.0] * len(tokens)
            name = instance.instance
            fleet.tell(events.TokensArrived(fleet.now_s, name, attempts, tokens, scores))
        for attempt, request in requests.items():
            whole = request.made_tokens >= request.total_tokens
            if whole and self.lives(instance) and attempt in instance.requests:
                del instance.requests[attempt]
                fleet.tell(self.ending(instance, request))

    def ending(self, instance: StormInstance, request: StormRequest) -> events.TurnEnded:
        """The correct `TurnEnded` of a request."""
        fleet, command = self._fleet, request.command
        most = fleet.plan.max_tokens
        reason = FinishReason.LENGTH if request.total_tokens >= most else FinishReason.STOP
        return events.TurnEnded(
            fleet.now_s,
            instance.instance,
            command.attempt,
            reason,
            total_tokens=request.made_tokens,
            version=command.version,
        )
