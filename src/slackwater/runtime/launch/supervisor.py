"""Local worker processes: started, kept alive with back-off, killed when they must go."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slackwater.control.operations.restarts import RestartPolicy
from slackwater.model.ids import WorkerId

logger = logging.getLogger(__name__)

SECRET_VARIABLE = "SLACKWATER_WORKER_SECRET"  # as in worker/process.py, which imports no runtime


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker that should always run: `python -m module arguments`."""

    name: str
    module: str
    arguments: tuple[str, ...]


class Launcher:
    """One task per plan; each start gets a fresh worker id, `name.1`, `name.2`, ..."""

    def __init__(
        self, log_directory: Path, secret: str, policy: RestartPolicy | None = None
    ) -> None:
        self._logs = log_directory
        self._secret = secret
        self._policy = policy or RestartPolicy()
        self._processes: dict[WorkerId, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._retired: set[WorkerId] = set()

    def start(self, plans: Sequence[WorkerPlan], connect: str) -> None:
        """Keep every plan running from now on."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._tasks += [asyncio.create_task(self._keep(plan, connect)) for plan in plans]

    def pids(self) -> dict[WorkerId, int]:
        return {worker: process.pid for worker, process in self._processes.items()}

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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
                await process.wait()
        self._processes.clear()

    async def _keep(self, plan: WorkerPlan, connect: str) -> None:
        loop = asyncio.get_running_loop()
        starts = deaths = 0
        while True:
            starts += 1
            worker = WorkerId(f"{plan.name}.{starts}")
            began_s = loop.time()
            process = await spawn_worker(plan, worker, connect, self._secret, self._logs)
            self._processes[worker] = process
            status = await process.wait()
            del self._processes[worker]
            if worker in self._retired:
                logger.info("worker retired worker=%s status=%d", worker, status)
                return
            deaths = self._policy.deaths_after(deaths, loop.time() - began_s)
            delay_s = self._policy.delay_s(deaths)
            logger.warning(
                "worker ended worker=%s status=%d restart_in_s=%.1f", worker, status, delay_s
            )
            await asyncio.sleep(delay_s)


async def spawn_worker(
    plan: WorkerPlan, worker: WorkerId, connect: str, secret: str, logs: Path
) -> asyncio.subprocess.Process:
    """Start one worker process under a name; what it says goes to `<plan>.log`."""
    # Threads that wait by spinning take the cores from each other: on a busy machine a pass took ten times the CPU time.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    environment |= {SECRET_VARIABLE: secret, "OMP_NUM_THREADS": "1"}
    with (logs / f"{plan.name}.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            plan.module,
            "--connect",
            connect,
            "--worker",
            worker,
            *plan.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
