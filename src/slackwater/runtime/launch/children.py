"""Named child processes: started with back-off, given notice, asked to leave, killed."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable

from slackwater.control.operations.restarts import RestartPolicy
from slackwater.model.ids import InstanceId
from slackwater.runtime.launch.port import (
    InstanceEnded,
    InstanceNoticed,
    StartFailed,
    Tell,
    WorkerProcess,
)
from slackwater.runtime.net.background import wait_until_set

logger = logging.getLogger(__name__)

Spawn = Callable[[InstanceId], Awaitable[WorkerProcess]]


class InstanceProcess:
    """The process of one instance, and why it was told to end."""

    def __init__(self) -> None:
        self.process: WorkerProcess | None = None
        self.task: asyncio.Task[None] | None = None
        self.unwanted = asyncio.Event()
        self.why = "it ended by itself"
        self.deadline: asyncio.TimerHandle | None = None

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class Children:
    """One task per instance, from its first start to its end.

    A process that dies unasked within `starts_within_s` has failed to start. It is reported and
    retried with back-off, `attempts` times in all. One that dies later is not restarted.
    """

    def __init__(
        self,
        spawn: Spawn,
        tell: Tell,
        *,
        policy: RestartPolicy | None = None,
        attempts: int = 5,
        starts_within_s: float = 1.0,
        leave_grace_s: float = 5.0,
    ) -> None:
        self._spawn = spawn
        self._tell = tell
        self._policy = policy or RestartPolicy()
        self._attempts = attempts
        self._starts_within_s = starts_within_s
        self._leave_grace_s = leave_grace_s
        self._children: dict[InstanceId, InstanceProcess] = {}

    def __contains__(self, instance: InstanceId) -> bool:
        return instance in self._children

    def names(self) -> tuple[InstanceId, ...]:
        return tuple(sorted(self._children))

    def pid(self, instance: InstanceId) -> int | None:
        child = self._children.get(instance)
        return child.process.pid if child is not None and child.process is not None else None

    def start(self, instance: InstanceId) -> None:
        """Start an instance unless it runs."""
        if instance in self._children:
            return
        child = self._children[instance] = InstanceProcess()
        child.task = asyncio.get_running_loop().create_task(self._live(instance, child))

    def notice(self, instance: InstanceId, grace_s: float) -> None:
        """Announce that it ends, and kill it after `grace_s`."""
        child = self._children.get(instance)
        if child is None or child.deadline is not None:
            return
        loop = asyncio.get_running_loop()
        child.deadline = loop.call_later(grace_s, self._overdue, instance, child)
        self._tell(InstanceNoticed(instance, grace_s))

    def release(self, instance: InstanceId) -> None:
        """SIGTERM, and SIGKILL once `leave_grace_s` has passed."""
        child = self._children.get(instance)
        if child is None or child.unwanted.is_set():
            return
        self._end(child, "it was released", signal.SIGTERM)
        loop = asyncio.get_running_loop()
        loop.call_later(self._leave_grace_s, child.signal, signal.SIGKILL)

    def kill(self, instance: InstanceId) -> None:
        child = self._children.get(instance)
        if child is not None:
            self._end(child, "it was killed", signal.SIGKILL)

    async def close(self) -> None:
        """Release everything and wait for its end."""
        for instance in self.names():
            self.release(instance)
        tasks = [child.task for child in self._children.values() if child.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _overdue(self, instance: InstanceId, child: InstanceProcess) -> None:
        if self._children.get(instance) is child:
            self._end(child, "its notice ran out", signal.SIGKILL)

    @staticmethod
    def _end(child: InstanceProcess, why: str, number: signal.Signals) -> None:
        if not child.unwanted.is_set():
            child.why = why
        child.unwanted.set()
        child.signal(number)

    async def _live(self, instance: InstanceId, child: InstanceProcess) -> None:
        try:
            reason = await self._run(instance, child)
        finally:
            if child.deadline is not None:
                child.deadline.cancel()
            del self._children[instance]
        self._tell(InstanceEnded(instance, reason))

    async def _run(self, instance: InstanceId, child: InstanceProcess) -> str:
        loop = asyncio.get_running_loop()
        for attempt in range(1, self._attempts + 1):
            began_s = loop.time()
            error = await self._once(instance, child)
            lived_s = loop.time() - began_s
            if child.unwanted.is_set():
                return child.why
            if error is None or lived_s >= self._starts_within_s:
                return f"{child.why}: {error or 'status 0'}"
            last = attempt == self._attempts
            retry_in_s = None if last else self._policy.delay_s(attempt)
            logger.warning(
                "start failed instance=%s error=%s retry_in_s=%s", instance, error, retry_in_s
            )
            self._tell(StartFailed(instance, error, retry_in_s))
            if retry_in_s is None:
                return f"it did not start in {self._attempts} attempts: {error}"
            if await wait_until_set(child.unwanted, retry_in_s):
                return child.why
        raise AssertionError("the last attempt returns")

    async def _once(self, instance: InstanceId, child: InstanceProcess) -> str | None:
        """Run one process to its end; its error, if any."""
        try:
            child.process = await self._spawn(instance)
        except OSError as error:
            return str(error)
        if child.unwanted.is_set():  # told to end while it was being started
            child.signal(signal.SIGKILL)
        status = await child.process.wait()
        return None if status == 0 else f"status {status}"
