"""Supervises workers that should always run: starts them, and restarts them with back-off."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slackwater.control.operations.restarts import RestartPolicy
from slackwater.model.errors import UnavailableError
from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.launch.nodes import NodeProcess
from slackwater.runtime.launch.port import WorkerPlan, WorkerProcess

logger = logging.getLogger(__name__)

Spawn = Callable[[NodeId, WorkerPlan, WorkerId], Awaitable[WorkerProcess]]


@dataclass(frozen=True, slots=True)
class FailedStart:
    """How often in a row a worker ended before it joined, and its last error."""

    name: str
    deaths: int
    error: str

    @property
    def persists(self) -> bool:
        """Whether the worker is not expected to start any more."""
        return self.deaths != 1

    def __str__(self) -> str:
        if not self.deaths:
            return f"worker {self.name} has no device: {self.error}"
        return f"worker {self.name} failed to start {self.deaths} times: {self.error}"


class WorkerSupervisor:
    """One task per plan of a node that is here; each start has a fresh worker id (`name.1`). What
    `adopt` finds is not started.
    """

    def __init__(
        self,
        spawn: Spawn,
        *,
        adopt: Callable[[NodeId, WorkerPlan], NodeProcess | None] = lambda node, plan: None,
    ) -> None:
        self._spawn, self._adopt = spawn, adopt
        self._policy = RestartPolicy()
        self._processes: dict[WorkerId, WorkerProcess] = {}
        self._tasks: dict[NodeId, list[asyncio.Task[None]]] = {}
        self._leaving: set[NodeId] = set()
        self._retired: set[WorkerId] = set()
        self._retired_plans: set[str] = set()
        self._starts: dict[str, int] = {}
        self._joined: set[WorkerId] = set()
        self._failed: dict[str, FailedStart] = {}

    def start(self, node: NodeId, plans: Sequence[WorkerPlan]) -> None:
        """Keep the plans' workers running on the node."""
        self._leaving.discard(node)
        wanted = [plan for plan in plans if plan.name not in self._retired_plans]
        tasks = [asyncio.create_task(self._keep(node, plan)) for plan in wanted]
        self._tasks.setdefault(node, []).extend(tasks)

    def refuse(self, plan: WorkerPlan, why: str) -> None:
        """Record that there is no device for a plan, which is not started."""
        self._starts.setdefault(plan.name, 0)
        self._failed[plan.name] = FailedStart(plan.name, 0, why)

    def stop(self, node: NodeId) -> None:
        """Stop supervising the workers of a lost node, until it comes back."""
        for task in self._tasks.pop(node, []):
            task.cancel()

    def leave(self, node: NodeId) -> None:
        """Do not restart workers of a node that leaves soon."""
        self._leaving.add(node)

    def pids(self) -> dict[WorkerId, int]:
        return {worker: process.pid for worker, process in self._processes.items()}

    def names(self) -> tuple[str, ...]:
        """The plans that were ever begun."""
        return tuple(self._starts)

    def starting(self) -> tuple[str, ...]:
        """The plans whose worker has not come up yet; one that keeps failing is not among them."""
        return tuple(
            name
            for name, number in self._starts.items()
            if WorkerId(f"{name}.{number}") not in self._joined
            and name not in self._retired_plans
            and name not in self._failed
        )

    def is_leaving(self, worker: WorkerId) -> bool:
        """Whether a worker is not to be started again."""
        return worker in self._retired

    def is_retired(self, name: str) -> bool:
        """Whether a plan's worker was let go for good."""
        return name in self._retired_plans

    def record_join(self, worker: WorkerId) -> None:
        """A worker has come up."""
        self._joined.add(worker)
        self._failed.pop(worker.rpartition(".")[0], None)

    def failures(self) -> dict[str, FailedStart]:
        """Those that have not come up since they last tried, by the name of their plan."""
        return dict(self._failed)

    def _record_failure(self, plan: WorkerPlan, worker: WorkerId, error: str) -> None:
        """Count an end before the worker had joined; one that had joined starts anew."""
        if worker in self._joined:
            self._joined.discard(worker)
            return
        earlier = self._failed.get(plan.name)
        deaths = 1 if earlier is None else earlier.deaths + 1
        self._failed[plan.name] = FailedStart(plan.name, deaths, error)

    def kill(self, worker: WorkerId) -> None:
        """End a worker at once; it is started again."""
        process = self._processes.get(worker)
        if process is not None and process.returncode is None:
            process.kill()

    def retire(self, worker: WorkerId) -> None:
        """Do not start the worker again once it has ended."""
        if worker in self._processes:
            self._retired.add(worker)

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop keeping workers; ask them to leave, then make them."""
        tasks = [task for node in list(self._tasks) for task in self._tasks.pop(node)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        leaving = [p for p in self._processes.values() if p.returncode is None]
        for process in leaving:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(process.wait() for process in leaving))
        for process in leaving:
            if process.returncode is None:
                process.kill()
        self._processes.clear()

    async def _keep(self, node: NodeId, plan: WorkerPlan) -> None:
        loop = asyncio.get_running_loop()
        deaths = 0
        while True:
            number = self._starts.get(plan.name, 0) + 1
            adopted = self._adopt(node, plan)
            if adopted is not None:
                number = int(adopted.worker.rpartition(".")[2])
            self._starts[plan.name] = number
            worker = WorkerId(f"{plan.name}.{number}")
            began_s, output = loop.time(), ""
            try:
                process = adopted or await self._spawn(node, plan, worker)
                self._processes[worker] = process
                status = f"status {await process.wait()}"
                output = getattr(process, "output", "")  # only agents report it
            except UnavailableError as error:
                status = str(error)
            finally:
                self._processes.pop(worker, None)
            if worker in self._retired:
                logger.info("worker retired worker=%s %s", worker, status)
                self._retired_plans.add(plan.name)
                return
            if node in self._leaving:
                return
            self._record_failure(plan, worker, output or status)
            deaths = self._policy.deaths_after(deaths, loop.time() - began_s)
            delay_s = self._policy.delay_s(deaths)
            logger.warning("worker ended worker=%s %s restart_in_s=%.1f", worker, status, delay_s)
            await asyncio.sleep(delay_s)
