"""File-worker processes do environments' file work, so that it cannot block the supervisor.

They are forked on demand and reused: handing over a task costs 0.1 ms, a fork several. Each runs
one task with a deadline; one that misses it or dies is replaced, and only its task fails.
"""

import contextlib
import gc
import logging
import marshal
import os
import resource
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.file_tasks import TASKS, Arguments
from slackwater.sandbox.launch import fork_helper, receive_exactly
from slackwater.sandbox.trees import TooDeepError

logger = logging.getLogger(__name__)

WORKERS_MOST = 8
# Of those, how many may delete or measure at once: others must find a free one.
_MOST_OF_KIND = {"delete": 1, "measure": 2}
_IDLE_MOST = 2
_SEND_WITHIN_S = 10.0
_LENGTH = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """A task's outcome; `hostile` if the folders' content caused the failure."""

    value: Any = None
    error: str | None = None
    hostile: bool = False


@dataclass(slots=True, eq=False)
class FileTask:
    """One task of one environment; `done` is called once, unless it is cancelled."""

    kind: str
    arguments: Arguments
    limit_s: float
    done: Callable[[TaskOutcome], None]


class Watcher(Protocol):
    """An event loop that calls back when a descriptor is readable."""

    def watch_reads(self, descriptor: int, came: Callable[[], None]) -> None: ...

    def unwatch(self, descriptor: int) -> None: ...


@dataclass(slots=True, eq=False)
class _Worker:
    """The supervisor's end of one process."""

    pid: int
    socket: socket.socket
    task: FileTask | None = None
    deadline_s: float = 0.0


class FileWorkers:
    """Hands out tasks in order. All calls and callbacks are on the supervisor's thread."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._workers: list[_Worker] = []
        self._waiting: deque[FileTask] = deque()
        self._dying: set[int] = set()
        self._unsent: list[tuple[FileTask, TaskOutcome]] = []  # told later, never within `submit`

    def submit(self, task: FileTask) -> FileTask:
        """Have a task done, now or when a process is free for it."""
        self._waiting.append(task)
        self._hand_out()
        return task

    def cancel(self, task: FileTask) -> None:
        """Cancel a task; partial work stays."""
        self._unsent = [each for each in self._unsent if each[0] is not task]
        with contextlib.suppress(ValueError):
            self._waiting.remove(task)
        for worker in [each for each in self._workers if each.task is task]:
            self._drop(worker)
        self._hand_out()

    @property
    def next_deadline_s(self) -> float | None:
        """When `check_deadlines` is next needed, monotonic."""
        if self._unsent:
            return 0.0
        return min(
            (each.deadline_s for each in self._workers if each.task is not None), default=None
        )

    @property
    def is_idle(self) -> bool:
        return not self._waiting and all(worker.task is None for worker in self._workers)

    def check_deadlines(self) -> None:
        """Kill workers past their deadlines."""
        unsent, self._unsent = self._unsent, []
        for task, outcome in unsent:
            self._tell(task, outcome)
        now_s = time.monotonic()
        for worker in list(self._workers):
            if worker.task is not None and now_s >= worker.deadline_s:
                task = worker.task
                self._drop(worker)
                why = f"it took longer than {task.limit_s:g} s"
                self._tell(task, TaskOutcome(error=why, hostile=True))
        self._reap()
        self._hand_out()

    def close(self) -> None:
        """End all of them; what waits is not done."""
        self._waiting.clear()
        for worker in list(self._workers):
            self._drop(worker)
        self._reap(blocking_s=2.0)

    def _hand_out(self) -> None:
        for task in list(self._waiting):
            if self._is_full(task.kind):
                continue
            try:
                worker = next((w for w in self._workers if w.task is None), None) or self._fork()
            except OSError as error:
                self._waiting.remove(task)
                why = f"no process can be started: {error.strerror}"
                self._unsent.append((task, TaskOutcome(error=why)))
                continue
            self._waiting.remove(task)
            self._send(worker, task)

    def _is_full(self, kind: str) -> bool:
        busy = [worker.task.kind for worker in self._workers if worker.task is not None]
        return len(busy) >= WORKERS_MOST or busy.count(kind) >= _MOST_OF_KIND.get(
            kind, len(busy) + 1
        )

    def _send(self, worker: _Worker, task: FileTask) -> None:
        worker.task, worker.deadline_s = task, time.monotonic() + task.limit_s
        try:
            body = marshal.dumps((task.kind, dict(task.arguments)))
            worker.socket.sendall(_LENGTH.pack(len(body)) + body)
        except (OSError, ValueError) as error:
            self._drop(worker)
            self._unsent.append((task, TaskOutcome(error=f"it cannot be handed over: {error}")))

    def _answered(self, worker: _Worker) -> None:
        """A worker is done with its task, or has died of it."""
        task, worker.task = worker.task, None
        try:
            length = _LENGTH.unpack(receive_exactly(worker.socket, _LENGTH.size))[0]
            outcome = TaskOutcome(*marshal.loads(receive_exactly(worker.socket, length)))
        except (OSError, UnavailableError, ValueError, EOFError, TypeError):
            self._drop(worker)
            outcome = TaskOutcome(error="the process that did it died", hostile=True)
        if sum(each.task is None for each in self._workers) > _IDLE_MOST:
            self._drop(worker)
        if task is not None:
            self._tell(task, outcome)
        self._reap()
        self._hand_out()

    def _tell(self, task: FileTask, outcome: TaskOutcome) -> None:
        try:
            task.done(outcome)
        except Exception:
            logger.exception("the outcome of a file task was not taken kind=%s", task.kind)

    def _fork(self) -> _Worker:
        pid, ours = fork_helper(_live, _SEND_WITHIN_S)
        process_tree.helpers.add(pid)
        worker = _Worker(pid, ours)
        self._workers.append(worker)
        self._watcher.watch_reads(ours.fileno(), lambda: self._answered(worker))
        return worker

    def _drop(self, worker: _Worker) -> None:
        """Kill a worker without waiting: it may take a while to die inside a system call."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self._watcher.unwatch(worker.socket.fileno())
        worker.socket.close()
        process_tree.kill(worker.pid)
        self._dying.add(worker.pid)

    def _reap(self, blocking_s: float = 0.0) -> None:
        deadline_s = time.monotonic() + blocking_s
        while self._dying:
            for pid in list(self._dying):
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG)[0] == 0:
                        continue
                self._dying.discard(pid)
                process_tree.helpers.discard(pid)
            if time.monotonic() >= deadline_s:
                return
            time.sleep(0.002)


def _live(ends: socket.socket) -> None:
    """The process itself, until the supervisor's end is closed."""
    linux.die_with_parent(signal.SIGKILL)
    gc.disable()  # a collection would touch, and so copy, every page
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    while True:
        body = receive_exactly(ends, _LENGTH.unpack(receive_exactly(ends, _LENGTH.size))[0])
        kind, arguments = marshal.loads(body)
        answer = marshal.dumps(_do(kind, arguments))
        ends.sendall(_LENGTH.pack(len(answer)) + answer)


def _do(kind: str, arguments: Arguments) -> tuple[Any, str | None, bool]:
    try:
        return TASKS[kind](**arguments), None, False
    except TooDeepError as error:
        return None, str(error), True
    except Exception as error:  # noqa: BLE001  (whatever it is, the supervisor must hear of it)
        return None, (str(error) or type(error).__name__)[:2000], False
