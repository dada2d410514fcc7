"""File workers: processes that do the file work of environments, so it cannot block the supervisor.

They are forked on demand and reused: sending a task costs 0.1 ms, a fork several. Each runs one
task with a deadline. One that misses its deadline or dies is replaced, and only its task fails.
"""

import contextlib
import gc
import logging
import marshal
import os
import resource
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.file_tasks import TASKS, Arguments
from slackwater.sandbox.launch import HelperProcess
from slackwater.sandbox.trees import TooDeepError
from slackwater.wire.framed_socket import receive_message, send_message

logger = logging.getLogger(__name__)

MAX_WORKERS = 8
# How many may delete or measure at once, so that a worker stays free for other tasks.
_MAX_OF_KIND = {"delete": 1, "measure": 2}
_MAX_IDLE = 2
_SEND_WITHIN_S = 10.0
_MAX_MESSAGE_BYTES = (1 << 32) - 1


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


@dataclass(slots=True, eq=False)
class _Worker:
    """The supervisor's end of one process."""

    pid: int
    socket: socket.socket
    task: FileTask | None = None
    deadline_s: float = 0.0


class FileWorkers:
    """Runs tasks in order. All calls and callbacks are on the supervisor's thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        """`selector`'s owner calls the data of each key that is ready."""
        self._selector = selector
        self._workers: list[_Worker] = []
        self._queue: deque[FileTask] = deque()
        self._dying: set[int] = set()
        # Outcomes for `check_deadlines`: `submit` never calls back.
        self._undelivered: list[tuple[FileTask, TaskOutcome]] = []

    def submit(self, task: FileTask) -> FileTask:
        """Queue a task; it starts when a worker is free."""
        self._queue.append(task)
        self._dispatch()
        return task

    def cancel(self, task: FileTask) -> None:
        """Cancel a task; partial work stays."""
        self._undelivered = [each for each in self._undelivered if each[0] is not task]
        with contextlib.suppress(ValueError):
            self._queue.remove(task)
        for worker in [each for each in self._workers if each.task is task]:
            self._kill(worker)
        self._dispatch()

    @property
    def next_deadline_s(self) -> float | None:
        """When `check_deadlines` is next needed, monotonic."""
        if self._undelivered:
            return 0.0
        return min(
            (each.deadline_s for each in self._workers if each.task is not None), default=None
        )

    @property
    def is_idle(self) -> bool:
        return not self._queue and all(worker.task is None for worker in self._workers)

    def check_deadlines(self) -> None:
        """Kill workers past their deadlines."""
        undelivered, self._undelivered = self._undelivered, []
        for task, outcome in undelivered:
            self._deliver(task, outcome)
        now_s = time.monotonic()
        for worker in list(self._workers):
            if worker.task is not None and now_s >= worker.deadline_s:
                task = worker.task
                self._kill(worker)
                reason = f"it took longer than {task.limit_s:g} s"
                self._deliver(task, TaskOutcome(error=reason, hostile=True))
        self._reap()
        self._dispatch()

    def close(self) -> None:
        """Kill all workers; queued tasks are dropped."""
        self._queue.clear()
        for worker in list(self._workers):
            self._kill(worker)
        self._reap(blocking_s=2.0)

    def _dispatch(self) -> None:
        for task in list(self._queue):
            if self._is_full(task.kind):
                continue
            try:
                worker = next((w for w in self._workers if w.task is None), None) or self._fork()
            except OSError as error:
                self._queue.remove(task)
                reason = f"no process can be started: {error.strerror}"
                self._undelivered.append((task, TaskOutcome(error=reason)))
                continue
            self._queue.remove(task)
            self._send(worker, task)

    def _is_full(self, kind: str) -> bool:
        busy = [worker.task.kind for worker in self._workers if worker.task is not None]
        return len(busy) >= MAX_WORKERS or busy.count(kind) >= _MAX_OF_KIND.get(kind, len(busy) + 1)

    def _send(self, worker: _Worker, task: FileTask) -> None:
        worker.task, worker.deadline_s = task, time.monotonic() + task.limit_s
        try:
            body = marshal.dumps((task.kind, dict(task.arguments)))
            send_message(worker.socket, body)
        except (OSError, ValueError) as error:
            self._kill(worker)
            self._undelivered.append(
                (task, TaskOutcome(error=f"it cannot be sent to a worker: {error}"))
            )

    def _receive_outcome(self, worker: _Worker) -> None:
        """Handle a worker that has finished its task or died during it."""
        task, worker.task = worker.task, None
        try:
            answer = receive_message(worker.socket, _MAX_MESSAGE_BYTES) or b""
            outcome = TaskOutcome(*marshal.loads(answer))
        except (OSError, ValueError, EOFError, TypeError):
            self._kill(worker)
            outcome = TaskOutcome(error="the process that did it died", hostile=True)
        if sum(each.task is None for each in self._workers) > _MAX_IDLE:
            self._kill(worker)
        if task is not None:
            self._deliver(task, outcome)
        self._reap()
        self._dispatch()

    def _deliver(self, task: FileTask, outcome: TaskOutcome) -> None:
        try:
            task.done(outcome)
        except Exception:
            logger.exception("the callback of a file task failed kind=%s", task.kind)

    def _fork(self) -> _Worker:
        helper = HelperProcess(_run_worker, _SEND_WITHIN_S)
        worker = _Worker(helper.pid, helper.socket)
        self._workers.append(worker)
        self._selector.register(
            worker.socket, selectors.EVENT_READ, lambda: self._receive_outcome(worker)
        )
        return worker

    def _kill(self, worker: _Worker) -> None:
        """Kill a worker without waiting: it may take a while to die inside a system call."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
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


def _run_worker(connection: socket.socket) -> None:
    """The process itself, until the supervisor's end is closed."""
    linux.die_with_parent(signal.SIGKILL)
    gc.disable()  # a collection would touch, and so copy, every page
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    while (order := receive_message(connection, _MAX_MESSAGE_BYTES)) is not None:
        send_message(connection, marshal.dumps(_execute(*marshal.loads(order))))


def _execute(kind: str, arguments: Arguments) -> tuple[Any, str | None, bool]:
    try:
        return TASKS[kind](**arguments), None, False
    except TooDeepError as error:
        return None, str(error), True
    except Exception as error:  # noqa: BLE001  (the supervisor needs an outcome in any case)
        return None, (str(error) or type(error).__name__)[:2000], False
