"""Real engine processes under a control plane without its HTTP face, for measurements and process
tests.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from harness.direct_worker import offer_models, spawn_directly
from harness.local_processes import LocalProcesses
from harness.preloaded_programs import AwaitedProgram
from harness.rollout_floor import Before, RolloutFloor
from slackwater.control.fleet.controller import FleetController
from slackwater.control.rollout.commands import CompleteTurn
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.errors import UnavailableError
from slackwater.model.ids import InstanceId, JobId, WorkerId
from slackwater.model.instance import InstanceState
from slackwater.model.turn import TurnSpec
from slackwater.runtime.launch.children import Children
from slackwater.runtime.launch.port import (
    InstanceNoticed,
    ProviderEvent,
    StartFailed,
    WorkerPlan,
)

BASE = "policy"
JOB = JobId("bench")
BASE_VERSION = "base:policy"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What the engines run, and how many turns each takes."""

    model: Path
    work: Path
    max_running: int = 64
    kv_mb: int = 64
    least_step_ms: float = 0.0

    def worker(self) -> WorkerPlan:
        arguments: tuple[str, ...] = ("--model", f"slackwater:models/{BASE}")
        arguments += ("--base", BASE, "--base-version", BASE_VERSION, "--kind", "spot")
        arguments += ("--max-running", str(self.max_running), "--kv-mb", str(self.kv_mb))
        arguments += ("--least-step-ms", str(self.least_step_ms))
        return WorkerPlan("engine", "slackwater.worker.engine_worker", arguments)


class LiveFleet:
    """Starts, notices and kills engines through the provider of local processes."""

    def __init__(
        self,
        plan: FleetPlan,
        settings: RolloutSettings | None = None,
        record: Callable[[bytes], None] | None = None,
        before: Callable[[FleetController], Before] | None = None,
    ) -> None:
        self._plan = plan
        self.floor = RolloutFloor(settings, record=record, released=self._let_go, before=before)
        self.children = Children(self._spawn, self._heard, leave_grace_s=5.0)
        self.provider = LocalProcesses(self.children, "engine")
        self.failed_starts: list[StartFailed] = []

    async def __aenter__(self) -> "LiveFleet":
        offer_models(self._plan.work, {BASE: self._plan.model})
        await self.floor.__aenter__()
        self.floor.rollout.publish(BASE_VERSION, BASE)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for instance in self.provider.instances():
            self.provider.kill(instance)
        await self.provider.close()
        await self.floor.__aexit__(kind, error, trace)

    def ready(self) -> list[InstanceRecord]:
        """Instances that can be given turns, by name."""
        found = self.floor.manager.state.instances.records
        return [found[name] for name in sorted(found) if found[name].state is InstanceState.READY]

    async def until_ready(self, count: int) -> None:
        """Wait until so many instances can be given turns."""
        while len(self.ready()) < count:
            if self.failed_starts:
                raise UnavailableError(f"an engine did not start: {self.failed_starts[0].error}")
            await asyncio.sleep(0.02)

    async def generate(self, specs: Sequence[TurnSpec]) -> list[CompleteTurn]:
        """All turns at once."""
        return await asyncio.gather(*(self.floor.generate(spec) for spec in specs))

    async def _spawn(self, instance: InstanceId) -> AwaitedProgram:
        worker = WorkerId(instance)
        return await spawn_directly(
            self._plan.worker(), worker, self.floor.connect, self.floor.secret, self._plan.work
        )

    def _heard(self, event: ProviderEvent) -> None:
        if isinstance(event, InstanceNoticed):
            self.floor.rollout.give_notice(event.instance, event.leaves_in_s)
        elif isinstance(event, StartFailed):
            self.failed_starts.append(event)

    def _let_go(self, worker: WorkerId) -> None:
        self.provider.release(InstanceId(worker))
