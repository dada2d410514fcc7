"""Launchers, which start the agents of nodes. The control plane sees only agents that connect.

`LocalAgents` are processes of this machine. Others may start agents (`slackwater agent --join`).
`ray_agents.py` starts agents under Ray; no other file imports Ray.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from slackwater.control.operations.restarts import RestartPolicy
from slackwater.model.ids import NodeId
from slackwater.runtime.priority import come_first, give_way
from slackwater.wire.agent import PIN, SECRET
from slackwater.wire.forked_process import wait_for_exit
from slackwater.wire.join_token import write_token

logger = logging.getLogger(__name__)

_AGENT = "slackwater.worker.agent"
# Workers of a node that is a few cores of this machine yield to the control plane, which needs a
# core for milliseconds: they have a lower priority and do not preempt others when they wake
# (SCHED_BATCH). Their session counts for little: a decision that loses its core gets it back at the
# next scheduler tick at the earliest, after 4 ms.
_NICE, _SESSION_NICE = 5, 10


@dataclass(frozen=True, slots=True)
class JoinAddress:
    """What an agent needs to join: the addresses of the control plane and its depot, a node's key,
    the pin of the control plane's certificate, and for agents that we start, in `budgets`, how much
    of the node its state manager may use.
    """

    hub: str
    depot: str
    key_of: Callable[[str, str | None], str]
    pin: str | None = None
    budgets: Mapping[str, str] = field(default_factory=dict)

    def environment(self, node: NodeId, pool: str | None) -> dict[str, str]:
        """The secrets, which no command line may show."""
        pinned = {} if self.pin is None else {PIN: self.pin}
        return {SECRET: self.key_of(node, pool)} | pinned | dict(self.budgets)

    def token(self, node: NodeId, pool: str) -> str:
        own = {"node": node, "pool": pool, "key": self.key_of(node, pool)}
        return write_token({"hub": self.hub, "depot": self.depot, "pin": self.pin} | own)


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """One agent to start. `files` is its option of that name; `logs` is a folder on the agent's own
    machine; `options` say which devices it reports.
    """

    node: NodeId
    files: str
    logs: str
    pool: str | None = None
    site: str = ""
    cores: tuple[int, ...] = ()
    options: tuple[str, ...] = ()

    def arguments(self, join: JoinAddress) -> tuple[str, ...]:
        """The command line of the agent's process."""
        pool = () if self.pool is None else ("--pool", self.pool)
        named = ("--node", self.node, "--files", self.files, "--logs", self.logs)
        site = ("--site", self.site) if self.site else ()
        connect = ("--connect", join.hub)
        # The agent sets its affinity itself, since it reports it, maybe before this process runs
        # again.
        cores = ("--cores", ",".join(map(str, self.cores))) if self.cores else ()
        return ("-m", _AGENT, *connect, *named, *pool, *site, *cores, *self.options)


class AgentLauncher:
    """Starts agents and restarts them when they die. The base class waits for agents that others
    start.
    """

    outlived: Set[NodeId] | None = None  # nodes whose agent ran before the start, if known

    def start(self, plans: Sequence[AgentPlan], join: JoinAddress) -> None:
        for plan in plans:
            logger.info("waiting for node=%s to join", plan.node)

    def deaths(self, node: NodeId) -> int | None:
        """How often in a row the node's agent has ended; None if another starts and watches it."""
        return None

    def stop_restarts(self) -> None:
        """From now on no agent that ends is started again."""

    async def close(self) -> None:
        """End the agents that it started, and clean up."""


class OutlivedAgent:
    """An agent that an earlier control plane started, told by its command line."""

    def __init__(self, pid: int, plan: AgentPlan) -> None:
        self.pid, self._marks = pid, {_AGENT, str(plan.node), plan.logs}
        self.command = self._command()
        self.returncode: int | None = None

    def _command(self) -> list[str]:
        """Empty once it has ended; a process that has its number now is no agent of the node."""
        try:
            shown = Path(f"/proc/{self.pid}/cmdline").read_bytes().decode()
            found = shown.rstrip("\0").split("\0")
        except (OSError, ValueError):
            return []
        return found if self._marks <= set(found) else []

    def lives(self) -> bool:
        return bool(self.command) and self._command() == self.command

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    async def wait(self) -> int:
        """Wait until it has ended; its status is unknown, so 0."""
        with contextlib.suppress(ProcessLookupError):
            await wait_for_exit(self.pid, self.lives)
        self.returncode = 0
        return 0


class LocalAgents(AgentLauncher):
    """Agents as child processes; one that dies is started again after a growing pause. They outlive
    this process, and the next control plane with these `logs` takes them over.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._policy = RestartPolicy()
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: dict[NodeId, asyncio.subprocess.Process | OutlivedAgent] = {}
        self._deaths: dict[NodeId, int] = {}
        self.outlived: set[NodeId] = set()

    def start(self, plans: Sequence[AgentPlan], join: JoinAddress) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        if any(plan.cores for plan in plans):
            come_first()
        for plan in plans:
            agent = self._find_outlived(plan)
            if agent is None or not agent.lives():
                continue
            self._processes[plan.node] = agent
            if agent.command == list(_command(plan, join)):
                self.outlived.add(plan.node)
            else:  # of another configuration: `_keep` starts the right one when it has ended
                agent.send_signal(signal.SIGTERM)
        self._tasks += [asyncio.create_task(self._keep(plan, join)) for plan in plans]

    def deaths(self, node: NodeId) -> int | None:
        return self._deaths.get(node, 0)  # it starts the agents of all listed nodes

    def stop_restarts(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self, grace_s: float = 10.0) -> None:
        self.stop_restarts()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        leaving = [p for p in self._processes.values() if p.returncode is None]
        with contextlib.suppress(TimeoutError):  # the hub has told them to stop
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(process.wait() for process in leaving))
        for process in leaving:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                await process.wait()
        self._processes.clear()

    async def _keep(self, plan: AgentPlan, join: JoinAddress) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            if plan.node not in self._processes:
                self._processes[plan.node] = await self._start(plan, join)
            status = await self._processes[plan.node].wait()
            del self._processes[plan.node]
            lived_s = loop.time() - began_s
            deaths = self._policy.deaths_after(self._deaths.get(plan.node, 0), lived_s)
            self._deaths[plan.node] = deaths
            delay_s = self._policy.delay_s(deaths)
            logger.warning(
                "agent ended node=%s status=%d restart_in_s=%.1f", plan.node, status, delay_s
            )
            await asyncio.sleep(delay_s)

    async def _start(self, plan: AgentPlan, join: JoinAddress) -> asyncio.subprocess.Process:
        environment = os.environ | join.environment(plan.node, plan.pool)
        with (self._logs / f"agent-{plan.node}.log").open("ab") as log:
            process = await _spawn(_command(plan, join), environment, log)
        if plan.cores:  # before it starts a worker, which inherits both
            give_way(_NICE, process.pid, session_nice=_SESSION_NICE)
            os.sched_setscheduler(process.pid, os.SCHED_BATCH, os.sched_param(0))
        self._pid_file(plan).write_text(str(process.pid))
        return process

    def _pid_file(self, plan: AgentPlan) -> Path:
        return self._logs / f"agent-{plan.node}.pid"

    def _find_outlived(self, plan: AgentPlan) -> OutlivedAgent | None:
        """The agent that the pid file names for the node."""
        try:
            return OutlivedAgent(int(self._pid_file(plan).read_text()), plan)
        except (OSError, ValueError):
            return None


async def _spawn(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # it must not get the control plane's priority and signals
        env=environment,
    )


def _command(plan: AgentPlan, join: JoinAddress) -> tuple[str, ...]:
    return (sys.executable, *plan.arguments(join), "--by-hand")
