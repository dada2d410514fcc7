"""A node's resident supervisor: environments and the actions that run in them.

One thread runs one loop over pipes and pidfds. It decides nothing: cores and limits come with each
order, and the driver calls `step`. An action ends with its first process; all others are killed
before the report. A failing action or environment never ends the loop: its report has the reason.
"""

import contextlib
import logging
import os
import select
import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from slackwater.model.errors import ConfigError, RefusedError, SlackwaterError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.backends.port import Backend, Order
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.environments import Environments, Note
from slackwater.sandbox.fences import Fence, Fences
from slackwater.sandbox.file_workers import FileTask, FileWorkers, TaskOutcome
from slackwater.sandbox.namespaces import kill_leftover_holders
from slackwater.sandbox.quarantine import QUARANTINE_FOLDER, Quarantine
from slackwater.sandbox.reports import ActionEnded, End, OutputPrinted, Report, Usage
from slackwater.sandbox.running_action import RunningAction
from slackwater.sandbox.snapshots import Snapshots
from slackwater.sandbox.users import UserPool

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 0.5
PRECEDENCE_EVERY_S = 0.1
MEASURE_WITHIN_S = 20.0
_DRAIN_READS = 64
_END_WITHIN_S = 5.0
_CLEANUP_WITHIN_S = 2.0
_READY_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class SandboxPlatform:
    """The backend, fences, snapshots and users chosen for this machine."""

    backend: Backend
    fences: Fences
    snapshots: Snapshots
    users: UserPool | None


@dataclass(frozen=True, slots=True)
class WaitingOrder:
    """An order, made at `requested_s`, that waits for its environment."""

    order: Order
    requested_s: float


class SandboxSupervisor:
    """`root` holds a folder for each environment."""

    def __init__(self, root: Path, platform: SandboxPlatform) -> None:
        self._platform = platform
        self._running: dict[str, RunningAction] = {}
        self._waiting: dict[str, WaitingOrder] = {}
        self._selector = selectors.DefaultSelector()
        self._reports: list[Report] = []
        self._used_fences: list[Fence] = []
        self._next_check_s = self._next_precedence_s = 0.0
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o711)  # users of environments can traverse it but not list it
        linux.adopt_orphans()
        if os.getuid() == 0:
            kill_leftover_holders(str(root))
        self._workers = FileWorkers(self._selector)
        self._quarantine = Quarantine(root / QUARANTINE_FOLDER, self._workers)
        self._environments = Environments(
            root,
            backend=platform.backend,
            snapshots=platform.snapshots,
            users=platform.users,
            workers=self._workers,
            quarantine=self._quarantine,
            report=self._reports.append,
            on_change=self._handle_change,
        )

    # ---- environments ----
    def environments(self) -> list[str]:
        return self._environments.names()

    def running(self) -> list[str]:
        return sorted(self._running)

    @property
    def quarantined(self) -> int:
        """The number of folders that could not be deleted or had problems."""
        return self._quarantine.count

    def open(
        self,
        name: str,
        snapshot: str | None = None,
        files: Mapping[str, bytes] | None = None,
        note: Note | None = None,
    ) -> None:
        """Create an environment, empty or from a snapshot, with files.

        Actions may be started at once and wait until it is open. With a note it survives restarts.
        """
        self._environments.open(name, snapshot, files or {}, note)

    def adopt(self) -> dict[str, Note]:
        """Adopt environments that an earlier supervisor kept; returns their notes by name."""
        return self._environments.adopt(self._wait_until)

    def snapshot(self, environment: str, name: str, max_bytes: int | None = None) -> None:
        """Snapshot an environment for others to start from; a report follows."""
        self._environments.snapshot(environment, name, max_bytes)

    def close_environment(self, name: str) -> None:
        """Remove an environment and kill what runs in it; those actions still get a report."""
        environment = self._environments.find(name)
        self._refuse_waiting(environment, End.STOPPED, "its environment was closed")
        for action, running in list(self._running.items()):
            if running.environment is environment:
                self.stop(action, "its environment was closed")
                self._finish_killed(running)
        self._unwatch_readiness(environment)
        self._environments.remove(environment)

    def _finish_killed(self, running: RunningAction) -> None:
        """Wait for a killed action; if the kernel delays its end, the report comes later."""
        if select.select([running.child.pidfd], [], [], _END_WITHIN_S)[0]:
            self._handle_event(running, self._finish)

    def _handle_change(self, environment: Environment, fault: str) -> None:
        """Start the orders that waited for an environment, or fail them with its fault."""
        if fault:
            self._refuse_waiting(environment, End.NOT_STARTED, fault)
        else:
            self._start_waiting(environment)

    def _orders_waiting_for(self, environment: Environment) -> list[WaitingOrder]:
        name = environment.name
        return [each for each in self._waiting.values() if each.order.environment == name]

    def _refuse_waiting(self, environment: Environment, end: End, reason: str) -> None:
        for waiting in self._orders_waiting_for(environment):
            del self._waiting[waiting.order.action]
            self._refuse(waiting.order.action, end, reason)

    def _refuse(self, action: str, end: End, reason: str) -> None:
        """Report the end of an action that never ran."""
        self._reports.append(ActionEnded(action, end, 127, Usage(), reason))

    def _start_waiting(self, environment: Environment) -> None:
        for waiting in self._orders_waiting_for(environment):
            del self._waiting[waiting.order.action]
            self._admit(environment, waiting)

    # ---- actions ----
    def start(self, order: Order) -> None:
        """Run an order; `step` reports on it."""
        waiting = WaitingOrder(order, time.monotonic())
        environment = self._environments.find(order.environment)
        if order.action in self._running or order.action in self._waiting:
            raise RefusedError(f"action: {order.action!r} is running already")
        if not order.command or not order.cores:
            raise ConfigError.of("action", order.action, "needs a command and at least one core")
        memoryview(order.stdin)  # hazard: a wrong type must fail here, before a process starts
        self._admit(environment, waiting)

    def _admit(self, environment: Environment, waiting: WaitingOrder) -> None:
        """Launch an order once nothing blocks it."""
        order = waiting.order
        if environment.populating is not None:
            self._waiting[order.action] = waiting
        elif environment.disk.excess(order.limits.disk_bytes):
            # It was too large at the last measurement, which may be outdated.
            self._waiting[order.action] = waiting
            self._measure(environment)
        elif self._is_ready(environment):
            self._launch(environment, waiting)
        else:
            self._waiting[order.action] = waiting

    def _is_ready(self, environment: Environment) -> bool:
        """Whether an action can enter now; if not, waiting orders start once one can."""
        if environment.readiness is None:
            try:
                environment.readiness = self._platform.backend.readiness(environment)
            except (OSError, SlackwaterError):
                return True  # the launch fails likewise and reports it
            if environment.readiness is None:
                return True
            environment.ready_by_s = time.monotonic() + _READY_WITHIN_S
            handle = partial(self._handle_ready, environment)
            self._selector.register(environment.readiness, selectors.EVENT_READ, handle)
        return False

    def _handle_ready(self, environment: Environment) -> None:
        self._unwatch_readiness(environment)
        self._start_waiting(environment)

    def _unwatch_readiness(self, environment: Environment) -> None:
        if environment.readiness is not None:
            self.unwatch(environment.readiness)
            environment.readiness = None

    def _launch(self, environment: Environment, waiting: WaitingOrder) -> None:
        order = waiting.order
        self._recycle_fences()
        fence = self._platform.fences.acquire(environment.name, environment.user, order.cores)
        try:
            launch = self._platform.backend.launch(environment, order, fence.rlimits(order.limits))
            child = fence.start(launch, order.limits)
        except Exception as error:
            if not isinstance(error, OSError | SlackwaterError):
                logger.exception("action did not start action=%s", order.action)
            self._platform.fences.release(fence)
            self._refuse(order.action, End.NOT_STARTED, f"it did not start: {error}")
            return
        environment.disk.stale = True
        environment.disk.last_limit = order.limits.disk_bytes
        running = RunningAction(order, environment, fence, child, waiting.requested_s)
        self._running[order.action] = running
        if running.feed():
            child.close_stdin()
        else:
            self._watch(child.stdin, selectors.EVENT_WRITE, running, self._feed_stdin)
        for stream in ("stdout", "stderr"):
            forward = partial(self._forward_output, stream=stream)
            self._watch(getattr(child, stream), selectors.EVENT_READ, running, forward)
        self._watch(child.pidfd, selectors.EVENT_READ, running, self._finish)

    def stop(self, action: str, reason: str) -> None:
        """Kill an action with everything that it started, if it is running."""
        if (running := self._running.get(action)) is not None:
            self._kill(running, End.STOPPED, reason)
        elif self._waiting.pop(action, None) is not None:
            self._refuse(action, End.STOPPED, reason)

    def watch(self, descriptor: int) -> None:
        """Let `step` return when this descriptor of the driver is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor, before it is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def step(self, timeout_s: float | None) -> list[Report]:
        """New reports; waits up to `timeout_s` for the first."""
        self._recycle_fences()
        self._poll(self._wait_s(timeout_s))
        self._check_limits()
        reports = self._reports[:]
        self._reports.clear()
        return reports

    def _poll(self, wait_s: float | None) -> None:
        """Handle ready descriptors, deadlines and retries."""
        for key, _ in self._selector.select(wait_s):
            if key.data is not None:
                key.data()
        self._workers.check_deadlines()
        self._quarantine.retry()

    def _wait_until(self, condition: Callable[[], bool], within_s: float) -> None:
        """Run file workers until a condition holds, for a while."""
        deadline_s = time.monotonic() + within_s
        while not condition() and (left_s := deadline_s - time.monotonic()) > 0:
            self._poll(min(left_s, 0.1))

    def close(self, keep: bool = False) -> None:
        """Stop everything and remove environments; with `keep`, only those without a note."""
        for environment in self._environments.all():
            if not keep or not environment.note:
                self.close_environment(environment.name)
        for action, running in list(self._running.items()):
            self.stop(action, "the worker stops")
            self._finish_killed(running)
        for environment in self._environments.all():
            self._unwatch_readiness(environment)
            self._environments.release(environment)
        self._recycle_fences()
        self._platform.backend.close()
        for key in list(self._selector.get_map().values()):
            if key.data is None:
                self._selector.unregister(key.fileobj)
        self._wait_until(lambda: self._workers.is_idle, _CLEANUP_WITHIN_S)
        self._workers.close()
        self._platform.fences.close()
        self._selector.close()
        if self._platform.users is not None:
            self._platform.users.close()

    # ---- the loop ----
    def _wait_s(self, timeout_s: float | None) -> float | None:
        if self._reports:
            return 0.0
        now_s = time.monotonic()
        due_s = [running.deadline_s - now_s for running in self._running.values()]
        due_s += [self._next_precedence_s - now_s] if self._running else []
        if any(each.disk.stale for each in self._environments.all()):
            due_s.append(self._next_check_s - now_s)
        for at_s in (self._workers.next_deadline_s, self._quarantine.next_try_s()):
            due_s += [] if at_s is None else [at_s - now_s]
        if timeout_s is not None:
            due_s.append(timeout_s)
        return max(min(due_s), 0.0) if due_s else None

    def _watch(
        self,
        descriptor: int,
        events: int,
        running: RunningAction,
        handle: Callable[[RunningAction], object],
    ) -> None:
        self._selector.register(descriptor, events, partial(self._handle_event, running, handle))

    def _handle_event(
        self, running: RunningAction, handle: Callable[[RunningAction], object]
    ) -> None:
        """Handle an event of a live action; a failure ends only that action."""
        if self._running.get(running.order.action) is not running:
            return
        try:
            handle(running)
        except Exception as error:
            logger.exception("action failed in the worker action=%s", running.order.action)
            self._abandon(running, f"the worker failed: {error!r}")

    def _abandon(self, running: RunningAction, reason: str) -> None:
        """Drop an action in any state. Its fence is not reused."""
        self._running.pop(running.order.action, None)
        child = running.child
        for descriptor in running.descriptors:
            self.unwatch(descriptor)
        for end in (child.kill, running.fence.kill_all, child.close):
            try:
                end()
            except Exception:
                logger.exception("action was not ended cleanly action=%s", running.order.action)
        self._reports.append(ActionEnded(running.order.action, End.STOPPED, -9, Usage(), reason))

    def _feed_stdin(self, running: RunningAction) -> None:
        if running.feed():
            self.unwatch(running.child.stdin)
            running.child.close_stdin()

    def _forward_output(self, running: RunningAction, stream: Literal["stdout", "stderr"]) -> bool:
        """Report output; whether more may follow."""
        data = running.read(stream)
        if data is None:
            return False
        if data:
            self._reports.append(OutputPrinted(running.order.action, stream, data))
        elif not running.is_flooding:
            self.unwatch(getattr(running.child, stream))
            return False
        if running.is_flooding and running.killed is None:
            limit = running.order.limits.output_bytes
            self._kill(running, End.OUTPUT, f"it printed more than {limit} bytes")
        return not running.is_flooding

    def _kill(self, running: RunningAction, end: End, reason: str) -> None:
        if running.killed is None:
            running.killed = (end, reason)
        running.child.kill()
        running.fence.kill_all()

    def _finish(self, running: RunningAction) -> None:
        """After the end of its first process: kill the others, drain the pipes, report."""
        running.fence.kill_all()
        for stream in ("stdout", "stderr"):
            for _ in range(_DRAIN_READS):
                if not self._forward_output(running, stream):
                    break
        for descriptor in running.descriptors:
            self.unwatch(descriptor)
        self._reports.append(running.finish())
        del self._running[running.order.action]
        running.environment.disk.stale = True
        running.child.close()
        self._used_fences.append(running.fence)

    def _recycle_fences(self) -> None:
        """Prepare fences of ended actions for the next ones."""
        used_fences, self._used_fences = self._used_fences, []
        for fence in used_fences:
            try:
                self._platform.fences.release(fence)
            except Exception:
                logger.exception("a fence cannot be reused and is dropped")
        if used_fences:
            self._reap_orphans()

    def _reap_orphans(self) -> None:
        try:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
        except ChildProcessError:
            return
        known = process_tree.helpers | {each.child.pid for each in self._running.values()}
        for pid in process_tree.children(os.getpid()):
            if pid not in known:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _check_limits(self) -> None:
        """Enforce deadlines; at intervals update precedences and measure disks."""
        now_s = time.monotonic()
        for running in list(self._running.values()):
            if now_s >= running.deadline_s and running.killed is None:
                self._kill(
                    running, End.WALL, f"it ran longer than {running.order.limits.wall_s:g} s"
                )
        if now_s >= self._next_precedence_s:
            self._next_precedence_s = now_s + PRECEDENCE_EVERY_S
            for running in self._running.values():
                if running.killed is None:
                    running.set_precedence(now_s)
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_EVERY_S
        for environment in self._environments.all():
            if environment.readiness is not None and now_s >= environment.ready_by_s:
                self._unwatch_readiness(environment)
                reason = f"its environment was not ready after {_READY_WITHIN_S:g} s"
                self._refuse_waiting(environment, End.NOT_STARTED, reason)
            if environment.disk.stale:
                self._measure(environment)

    # ---- disks ----
    def _measure(self, environment: Environment) -> None:
        """Start a measurement of an environment's size, unless one is running."""
        if environment.disk.measuring:
            return
        running_here = [each for each in self._running.values() if each.environment is environment]
        waiting = self._orders_waiting_for(environment)
        orders = [each.order for each in running_here] + [each.order for each in waiting]
        environment.disk.measuring = True
        environment.disk.stale = bool(running_here)  # running actions keep writing
        self._workers.submit(
            FileTask(
                "measure",
                {
                    "folders": environment.changed_folders,
                    "view": environment.view,
                    "user": environment.user,
                    "top_pids": [each.child.reaper or each.child.pid for each in running_here],
                    "stop_above": max(
                        (order.limits.disk_bytes for order in orders),
                        default=environment.disk.last_limit,
                    ),
                },
                MEASURE_WITHIN_S,
                partial(self._record_size, environment, running_here, waiting),
            )
        )

    def _record_size(
        self,
        environment: Environment,
        running_here: list[RunningAction],
        waiting: list[WaitingOrder],
        outcome: TaskOutcome,
    ) -> None:
        """Apply a size that was measured while `running_here` ran and `waiting` waited."""
        disk = environment.disk
        disk.record(outcome)
        if environment not in self._environments.all():
            return
        if disk.stale and outcome.error is not None:
            logger.warning("size unknown name=%s why=%s", environment.name, outcome.error)
        for running in running_here:
            reason = disk.excess(running.order.limits.disk_bytes)
            if reason and self._running.get(running.order.action) is running:
                self._kill(running, End.DISK, reason)
        for each in waiting:
            if self._waiting.pop(each.order.action, None) is None:
                continue
            if reason := disk.excess(each.order.limits.disk_bytes):
                self._refuse(each.order.action, End.NOT_STARTED, reason)
            else:
                self._admit(environment, each)
        if self._orders_waiting_for(environment) and environment.populating is None:
            self._measure(environment)
