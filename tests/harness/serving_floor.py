"""A control plane without its HTTP face over real processes: a served model whose worker lends, and
a rollout's own engine.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from harness.direct_worker import offer_models, spawn_directly
from harness.live_fleet import BASE, BASE_VERSION
from harness.preloaded_programs import AwaitedProgram
from harness.rollout_floor import RolloutFloor
from slackwater.control.jobs.events import JobTrained
from slackwater.control.lending.lender import LenderSettings, LendingController
from slackwater.control.rollout.facts import TurnOpened
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.errors import UnavailableError
from slackwater.model.ids import JobId, WorkerId
from slackwater.policy.serving.lender_choice import LenderRule
from slackwater.runtime.executors.serving import Offer
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.live_driver import loop_time
from slackwater.wire.lending import is_loan

CHAT = "chat"
CHAT_VERSION = "base:chat"


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """Models, memory and the promise. A slow machine is no reason not to lend: the promise is
    loose.
    """

    chat: Path
    policy: Path
    work: Path
    kv_mb: int = 2
    page_kb: int = 8
    slo: str = "ttft=5,tpot=1"
    mode: str = "foresight"
    lend: bool = True

    def chat_worker(self) -> WorkerPlan:
        arguments: tuple[str, ...] = ("--model", f"slackwater:models/{CHAT}", "--base", CHAT)
        arguments += ("--base-version", CHAT_VERSION, "--kv-mb", str(self.kv_mb))
        arguments += ("--page-kb", str(self.page_kb), "--slo", self.slo, "--mode", self.mode)
        arguments += ("--max-running", "16", *(self._lends() if self.lend else ()))
        return WorkerPlan("serving", "slackwater.worker.coserving_worker", arguments)

    def _lends(self) -> tuple[str, ...]:
        return ("--lend", "--borrower", f"slackwater:models/{BASE}", BASE_VERSION)

    def policy_worker(self) -> WorkerPlan:
        arguments: tuple[str, ...] = ("--model", f"slackwater:models/{BASE}", "--base", BASE)
        arguments += ("--base-version", BASE_VERSION, "--kind", "dedicated")
        arguments += ("--max-running", "4", "--kv-mb", "32")
        return WorkerPlan("engine", "slackwater.worker.engine_worker", arguments)


class ServingFloor:
    """Starts and kills both kinds of worker by name; each start has a name of its own. Jobs that
    are `live` roll out between their turns, too.
    """

    def __init__(self, plan: ServingPlan, live: frozenset[JobId] = frozenset()) -> None:
        self.plan = plan
        rule = LenderRule(
            most_kv=0.9, most_busy=0.99, back_kv=0.98, back_busy=1.0, rest_s=0.5, trial_s=3600.0
        )
        settings = LenderSettings(rule, window_s=2.0, review_every_s=0.3)
        self.floor = RolloutFloor(
            RolloutSettings(
                borrowed_stall_s=4.0, max_losses_without_progress=100, watch_every_s=0.2
            ),
            lending=LendingController([BASE], settings),
            offers={BASE: Offer(BASE_VERSION, f"slackwater:models/{BASE}")},
        )
        self.lending = self.floor.lending
        self._live = live
        self._processes: dict[WorkerId, AwaitedProgram] = {}
        self._starts = 0

    async def __aenter__(self) -> "ServingFloor":
        offer_models(self.plan.work, {BASE: self.plan.policy, CHAT: self.plan.chat})
        await self.floor.__aenter__()
        self.floor.rollout.publish(BASE_VERSION, BASE)
        self.floor.rollout.publish(CHAT_VERSION, CHAT)
        for job in self._live:  # as if one of its turns lived all the while
            self.floor.runtime.feed(TurnOpened(loop_time(), job, CHAT))
        return self

    def step(self, job: JobId) -> None:
        """The job's optimizer steps: its next turns belong to its next RL step."""
        self.floor.runtime.feed(JobTrained(loop_time(), job, 0.0, ends_step=True))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in list(self._processes):
            self.kill(worker)
        for process in self._processes.values():
            await process.wait()
        await self.floor.__aexit__(kind, error, trace)

    async def start(self, plan: WorkerPlan) -> WorkerId:
        """One more worker; it joins when it is up."""
        self._starts += 1
        worker = WorkerId(f"{plan.name}.{self._starts}")
        floor = self.floor
        self._processes[worker] = await spawn_directly(
            plan, worker, floor.connect, floor.secret, self.plan.work
        )
        return worker

    def kill(self, worker: WorkerId) -> None:
        process = self._processes[worker]
        if process.returncode is None:
            process.kill()

    async def until_joined(self, worker: WorkerId) -> None:
        """Wait for it; UnavailableError if its process ended instead."""
        while worker not in self.floor.hub.workers():
            if self._processes[worker].returncode is not None:
                raise UnavailableError(f"{worker} ended with {self._processes[worker].returncode}")
            await asyncio.sleep(0.02)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that workers will say."""
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)

    async def until_said(self, worker: WorkerId) -> None:
        """Wait for its next heartbeat."""
        before = self.gauges_of(worker)
        await self.until(lambda: self.gauges_of(worker) is not before)

    def borrowed(self) -> list[WorkerId]:
        """Instances that rollouts have on serving workers."""
        return [worker for worker in self.floor.hub.workers() if is_loan(worker)]

    def gauges_of(self, worker: WorkerId) -> dict[str, float]:
        """What it said of itself last."""
        return self.floor.rollout.gauges.get(worker, {})
