"""Instances that an operator adds, lists, drains or kills, or that a spot trace replays.

An added instance, an embedded engine or a vLLM adapter, runs on a node of the fleet and is not
restarted. Engines of `slackwater up` and of its instance list are restarted unless drained.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slackwater.control.fleet.controller import FleetController
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.model.errors import NotFoundError
from slackwater.model.ids import InstanceId, NodeId, WorkerId
from slackwater.model.instance import InstanceState
from slackwater.model.spot_trace import SpotEvent
from slackwater.runtime.executors.engines import EngineExecutor
from slackwater.runtime.launch.children import Children
from slackwater.runtime.launch.instance_list import InstanceRequest
from slackwater.runtime.launch.port import (
    InstanceEnded,
    InstanceNoticed,
    ProviderEvent,
    StartFailed,
    WorkerPlan,
    WorkerProcess,
)
from slackwater.runtime.launch.supervisor import WorkerSupervisor
from slackwater.runtime.live_driver import loop_time

MOST_INSTANCES = 64
_FAULTS_SHOWN = 20
_LISTED_AGAIN_S = 3.0  # until a listed instance that ended is started again


class InstanceService:
    """Executes what an operator or a trace asks for; the rollout manager decides about turns."""

    def __init__(
        self,
        controller: FleetController,
        rollout: EngineExecutor,
        supervisor: WorkerSupervisor,
        *,
        spawn: Callable[[WorkerPlan, WorkerId], Awaitable[WorkerProcess]],
        engine_arguments: Callable[[str], tuple[str, ...]],
        logs: Path,
    ) -> None:
        """`spawn` starts a worker, `engine_arguments` returns a model's; workers log to `logs`."""
        self._spawn_worker, self._engine_arguments, self._logs = spawn, engine_arguments, logs
        self._controller = controller
        self._fleet = controller.rollout.state.instances
        self._rollout = rollout
        self._supervisor = supervisor
        self._requests: dict[InstanceId, InstanceRequest] = {}
        self._children = Children(self._spawn, self._handle_process_event)
        self._faults: deque[str] = deque(maxlen=_FAULTS_SHOWN)
        self._added = 0
        self.drained: set[InstanceId] = set()  # on request, so their end is not a fault
        self._listed: set[InstanceId] = set()
        self._replays: set[asyncio.Task[None]] = set()

    def keep_running(self, listed: Mapping[InstanceId, InstanceRequest]) -> None:
        """Start the instances of a list, and restart them when they end."""
        for request in listed.values():
            self._check(request)
        self._requests |= listed
        self._listed = set(listed)
        self._start_listed()

    def _start_listed(self) -> None:
        for name in sorted(self._listed):
            self._children.start(name)

    def count_remote(self, excluded: Sequence[NodeId]) -> int:
        """Engines that run elsewhere than on training nodes, without those on `excluded` nodes."""
        specs = [record.spec for record in self._fleet if not record.is_local]
        return sum(spec.node not in excluded for spec in specs)

    # ---- for the operator ----
    def add(self, request: InstanceRequest, count: int) -> tuple[InstanceId, ...]:
        """Start up to `count` instances; returns their names, fewer at the limit."""
        self._check(request)
        room = MOST_INSTANCES - len(self._children.names())
        names: list[InstanceId] = []
        for _ in range(min(count, room)):
            self._added += 1
            names.append(InstanceId(f"added-{self._added}"))
            self._requests[names[-1]] = request
            self._children.start(names[-1])
        return tuple(names)

    def drain(self, instance: InstanceId, move_turns: bool) -> None:
        """Stop giving it turns. It ends when its turns are done, or at once with `move_turns`."""
        self._check_exists(instance)
        self.drained.add(instance)
        self._supervisor.retire(WorkerId(instance))
        self._listed.discard(instance)
        if instance in self._fleet.records:
            self._rollout.drain(instance, move_turns)
        else:
            self._children.release(instance)

    def kill(self, instance: InstanceId) -> None:
        """End its process at once, as a crash would."""
        self._check_exists(instance)
        self._children.kill(instance)
        self._supervisor.kill(WorkerId(instance))

    def replay(
        self, request: InstanceRequest, events: Sequence[SpotEvent], speed: float, notice_s: float
    ) -> None:
        """Start and end instances as a spot trace says, from now on."""
        self._check(request)
        for event in events:
            self._requests[InstanceId(event.instance_id)] = request
        played = replay_trace(events, self._children, speed=speed, notice_s=notice_s)
        task = asyncio.get_running_loop().create_task(played)
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)

    def is_starting(self, model: str) -> bool:
        """Whether an added or listed instance of a model may still come up."""
        named = self._requests if self._replays else self._children.names()
        coming = {*named, *(name for name in self._requests if name in self._listed)}
        return any(self._requests[name].model == model for name in coming)

    def has_request_for(self, model: str) -> bool:
        return any(request.model == model for request in self._requests.values())

    def rows(self) -> list[dict[str, Any]]:
        """One row per instance, by name; one that has not joined is `starting` or `failed`."""
        now_s = loop_time()
        shown = [self._row(record, now_s) for record in self._fleet]
        for spec in self._controller.steps.resting():
            row = {"instance": spec.instance, "model": spec.base_model, "kind": spec.kind.value}
            pid = self._supervisor.pids().get(WorkerId(spec.instance))
            shown.append({**row, "state": "resting", "pid": pid})
        for name in self._children.names():
            if name not in self._fleet.records:
                request = self._requests[name]
                row = {"instance": name, "model": request.model, "kind": request.kind.value}
                shown.append({**row, "state": "starting", "pid": self._children.pid(name)})
        for failed in self._supervisor.failures().values():
            if not failed.name.startswith("trainer"):
                row = {"instance": failed.name, "state": "failed", "error": failed.error}
                shown.append({**row, "failed_starts": failed.deaths})
        return sorted(shown, key=lambda row: str(row["instance"]))

    def faults(self) -> list[str]:
        return list(self._faults)

    # ---- for the control plane ----
    def release(self, worker: WorkerId) -> None:
        """End an instance on which nothing runs any more."""
        if InstanceId(worker) in self._children:
            self._children.release(InstanceId(worker))
        else:
            self._supervisor.kill(worker)

    def kill_child(self, worker: WorkerId) -> None:
        """Kill a process whose connection ended: it may hang."""
        self._children.kill(InstanceId(worker))

    async def close(self) -> None:
        self._listed.clear()  # restarts that are due find nothing to start
        for task in self._replays:
            task.cancel()
        await asyncio.gather(*self._replays, return_exceptions=True)
        await self._children.close()

    # ---- processes ----
    async def _spawn(self, instance: InstanceId) -> WorkerProcess:
        request = self._requests[instance]
        plan = request.plan(instance, self._engine_arguments(request.model))
        return await self._spawn_worker(plan, WorkerId(instance))

    def _handle_process_event(self, event: ProviderEvent) -> None:
        if isinstance(event, InstanceNoticed):
            self._rollout.give_notice(event.instance, event.leaves_in_s)
        elif isinstance(event, StartFailed):
            log = self._logs / f"{event.instance}.log"
            self._faults.append(f"{event.instance}: did not start: {event.error}; see {log}")
        elif isinstance(event, InstanceEnded) and event.instance in self._listed:
            asyncio.get_running_loop().call_later(_LISTED_AGAIN_S, self._start_listed)

    def _check(self, request: InstanceRequest) -> None:
        """Refuse what cannot be started, before anything starts."""
        self._engine_arguments(request.model)
        request.worker()

    def _check_exists(self, instance: InstanceId) -> None:
        supervised = WorkerId(instance) in self._supervisor.pids()
        if (
            instance not in self._fleet.records
            and instance not in self._children
            and not supervised
        ):
            raise NotFoundError(
                f"instance: {instance!r} does not exist; see `slackwater instance list`"
            )

    def _state(self, record: InstanceRecord) -> str:
        joining = record.state is InstanceState.JOINING
        pulls = joining and bool(self._controller.weights.pulling(record.spec.instance))
        return InstanceState.PULLING.value if pulls else record.state.value

    def _row(self, record: InstanceRecord, now_s: float) -> dict[str, Any]:
        spec, load = record.spec, record.load
        pid = self._children.pid(spec.instance)
        return {
            "instance": spec.instance,
            "model": spec.base_model,
            "kind": spec.kind.value,
            "state": self._state(record),
            "versions": sorted(record.versions | record.recalled),
            "running": load.executing,
            "pending": load.pending,
            "max_running": load.max_running,
            "kv_load_tokens": load.kv_load_tokens,
            "kv_tokens": load.kv_tokens,
            "tokens_per_s": round(load.produced_per_s, 1),
            "exact_continuation": spec.exact_continuation,
            "faults": record.faults,
            "heard_s_ago": round(now_s - record.heard_s, 1),
            "pid": pid or self._supervisor.pids().get(WorkerId(spec.instance)),
        }


async def replay_trace(
    events: Sequence[SpotEvent], children: Children, *, speed: float, notice_s: float
) -> None:
    """Adds start instances, removes end them; a second of the trace takes `1 / speed` seconds.

    A remove gives `notice_s` (of real time) to the instance; with none it is killed at once.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for event in events:
        instance = InstanceId(event.instance_id)
        await asyncio.sleep(began_s + event.t_s / speed - loop.time())
        if event.event == "add":
            children.start(instance)
        elif notice_s > 0:
            children.notice(instance, notice_s)
        else:
            children.kill(instance)
