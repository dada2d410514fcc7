"""Instances beside those that the service always keeps: added, listed, drained, killed, or replayed from a trace.

An added instance is a process of this machine: an embedded engine, or the adapter of a vLLM server. When it is
gone it stays gone; the engines that `slackwater up` keeps, and the instances of its list, are started again, unless
they were drained.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slackwater.control.rollout.instances import InstanceRecord, Instances
from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.model.ids import InstanceId, WorkerId
from slackwater.model.instance import InstanceKind
from slackwater.model.spot_trace import SpotEvent
from slackwater.runtime.bodies.rollout import RolloutBody
from slackwater.runtime.launch.children import Children
from slackwater.runtime.launch.fixed_list import FixedList
from slackwater.runtime.launch.local_processes import LocalProcesses
from slackwater.runtime.launch.port import (
    InstanceEnded,
    InstanceNoticed,
    ProviderEvent,
    StartFailed,
)
from slackwater.runtime.launch.spot_replay import SpotReplay
from slackwater.runtime.launch.supervisor import Launcher, WorkerPlan, spawn_worker

logger = logging.getLogger(__name__)

MOST_INSTANCES = 64
VLLM_VARIABLE = "SLACKWATER_VLLM"
_FAULTS_SHOWN = 20
_LISTED_AGAIN_S = 3.0  # an instance of the list that is gone is started again after so long


@dataclass(frozen=True, slots=True)
class InstanceWish:
    """What to start: an embedded engine of a model, or the adapter of a vLLM server.

    That is the server at `vllm_url`, or one of its own that it starts with the program `SLACKWATER_VLLM`.
    """

    model: str
    kind: InstanceKind = InstanceKind.SPOT
    engine: Literal["embedded", "vllm"] = "embedded"
    vllm_url: str | None = None

    def worker(self) -> tuple[str, tuple[str, ...]]:
        """The worker's module and what it is told beside its model."""
        arguments = ("--kind", self.kind.value)
        if self.engine == "embedded":
            return "slackwater.worker.engine_worker", arguments
        if self.vllm_url is not None:
            return "slackwater.worker.vllm.adapter", (*arguments, "--url", self.vllm_url)
        program = os.environ.get(VLLM_VARIABLE)
        if program is None:
            fix = f"must be given, or `slackwater up` be started with {VLLM_VARIABLE} set"
            raise ConfigError.of("vllm_url", None, fix)
        return "slackwater.worker.vllm.adapter", (*arguments, "--vllm", program)


@dataclass(frozen=True, slots=True)
class Premises:
    """Where workers run: how they connect, and what every engine of a model is told."""

    secret: str
    logs: Path
    connect: Callable[[], str]
    engine_arguments: Callable[[str], tuple[str, ...]]


class InstanceService:
    """Carries out what an operator or a trace says; the rollout manager decides about turns."""

    def __init__(
        self,
        premises: Premises,
        fleet: Instances,
        rollout: RolloutBody,
        launcher: Launcher,
    ) -> None:
        self._premises = premises
        self._fleet = fleet
        self._rollout = rollout
        self._launcher = launcher
        self._wishes: dict[InstanceId, InstanceWish] = {}
        self._children = Children(self._spawn, self._heard)
        self._faults: deque[str] = deque(maxlen=_FAULTS_SHOWN)
        self._added = 0
        self._list = FixedList(self._children, ())
        self._again: set[asyncio.TimerHandle] = set()
        self._replays: set[asyncio.Task[None]] = set()

    def keep(self, listed: Mapping[InstanceId, InstanceWish]) -> None:
        """Start the instances of a list, and start them again when they are gone."""
        for wish in listed.values():
            self._check(wish)
        self._wishes |= listed
        self._list = FixedList(self._children, tuple(listed))
        self._list.start(len(listed))

    # ---- what an operator says ----
    def add(self, wish: InstanceWish, count: int) -> tuple[InstanceId, ...]:
        """Start up to `count` more; returns those begun, fewer if there are too many already."""
        self._check(wish)
        room = MOST_INSTANCES - len(self._children.names())
        names: list[InstanceId] = []
        for _ in range(min(count, room)):
            self._added += 1
            names.append(InstanceId(f"added-{self._added}"))
            self._wishes[names[-1]] = wish
            self._children.start(names[-1])
        return tuple(names)

    def drain(self, instance: InstanceId, move_turns: bool) -> None:
        """No more turns; gone for good when those it has are done, or now if they are to move."""
        self._known(instance)
        self._launcher.retire(WorkerId(instance))
        self._list.retire(instance)
        if instance in self._fleet.records:
            self._rollout.drain(instance, move_turns)
        else:
            self._children.release(instance)

    def kill(self, instance: InstanceId) -> None:
        """End its process at once, as a crash would."""
        self._known(instance)
        self._children.kill(instance)
        self._launcher.kill(WorkerId(instance))

    def replay(
        self, wish: InstanceWish, events: Sequence[SpotEvent], speed: float, notice_s: float
    ) -> None:
        """Let a spot trace give and take instances from now on."""
        self._check(wish)
        for event in events:
            self._wishes[InstanceId(event.instance_id)] = wish
        onto = LocalProcesses(self._children, "spot", MOST_INSTANCES)
        played = SpotReplay(events, onto, speed=speed, notice_s=notice_s)
        task = asyncio.get_running_loop().create_task(played.run())
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)

    def listed(self) -> list[dict[str, Any]]:
        """Every instance, by name; those that have not joined yet are `starting`."""
        now_s = asyncio.get_running_loop().time()
        shown = [self._shown(record, now_s) for record in self._fleet]
        for worker, facts in self._rollout.lent.resting().items():
            row = {"instance": worker, "model": facts.base_model, "kind": facts.kind}
            shown.append({**row, "state": "resting", "pid": self._launcher.pids().get(worker)})
        for name in self._children.names():
            if name not in self._fleet.records:
                wish = self._wishes[name]
                row = {"instance": name, "model": wish.model, "kind": wish.kind.value}
                shown.append({**row, "state": "starting", "pid": self._children.pid(name)})
        return sorted(shown, key=lambda row: str(row["instance"]))

    def faults(self) -> list[str]:
        """The last starts that failed."""
        return list(self._faults)

    # ---- what the plane says ----
    def release(self, worker: WorkerId) -> None:
        """The manager lets an instance go: nothing runs on it."""
        if InstanceId(worker) in self._children:
            self._children.release(InstanceId(worker))
        else:
            self._launcher.kill(worker)

    def lost(self, worker: WorkerId) -> None:
        """Its connection ended: so must its process, which may hang."""
        self._children.kill(InstanceId(worker))

    async def close(self) -> None:
        for timer in self._again:
            timer.cancel()
        self._list = FixedList(self._children, ())
        for task in self._replays:
            task.cancel()
        await asyncio.gather(*self._replays, return_exceptions=True)
        await self._children.close()

    # ---- processes ----
    async def _spawn(self, instance: InstanceId) -> asyncio.subprocess.Process:
        wish = self._wishes[instance]
        module, arguments = wish.worker()
        common = self._premises.engine_arguments(wish.model)
        plan = WorkerPlan(instance, module, (*common, *arguments))
        connect, premises = self._premises.connect(), self._premises
        return await spawn_worker(plan, WorkerId(instance), connect, premises.secret, premises.logs)

    def _heard(self, event: ProviderEvent) -> None:
        if isinstance(event, InstanceNoticed):
            self._rollout.notice(event.instance, event.leaves_in_s)
        elif isinstance(event, StartFailed):
            log = self._premises.logs / f"{event.instance}.log"
            self._faults.append(f"{event.instance}: did not start: {event.error}; see {log}")
        elif isinstance(event, InstanceEnded) and event.instance in self._list:
            self._start_again()

    def _start_again(self) -> None:
        def start() -> None:
            self._again.discard(timer)
            self._list.start(MOST_INSTANCES)

        timer = asyncio.get_running_loop().call_later(_LISTED_AGAIN_S, start)
        self._again.add(timer)

    def _check(self, wish: InstanceWish) -> None:
        """Refuse what cannot be started, before anything is begun."""
        self._premises.engine_arguments(wish.model)
        wish.worker()

    def _known(self, instance: InstanceId) -> None:
        kept = WorkerId(instance) in self._launcher.pids()
        if instance not in self._fleet.records and instance not in self._children and not kept:
            raise NotFoundError(
                f"instance: {instance!r} is not there; see `slackwater instance list`"
            )

    def _shown(self, record: InstanceRecord, now_s: float) -> dict[str, Any]:
        spec, load = record.spec, record.load
        pid = self._children.pid(spec.instance)
        return {
            "instance": spec.instance,
            "model": spec.job,
            "kind": spec.kind.value,
            "state": record.state.value,
            "versions": list(record.versions),
            "running": load.executing,
            "pending": load.pending,
            "max_running": load.max_running,
            "kv_load_tokens": load.kv_load_tokens,
            "kv_tokens": load.kv_tokens,
            "tokens_per_s": round(load.produced_per_s, 1),
            "exact_continuation": spec.exact_continuation,
            "faults": record.faults,
            "heard_s_ago": round(now_s - record.heard_s, 1),
            "pid": pid or self._launcher.pids().get(WorkerId(spec.instance)),
        }
