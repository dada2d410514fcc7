"""The resident supervisor of a node: environments, and the actions that run in them.

One thread and one loop over pipes and process descriptors; a new action costs a fork and an exec, not a new
interpreter. It decides nothing: cores and limits come with each order, and whoever drives it calls `step`.

An action ends when its first process has ended; whatever it left behind is killed before the report.
"""

import contextlib
import json
import logging
import os
import select
import selectors
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError, SlackwaterError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.backends.port import Backend, Order
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.fences import Fence, Fences
from slackwater.sandbox.held import end_left
from slackwater.sandbox.reports import Began, End, Over, Printed, Report, Usage
from slackwater.sandbox.running import Running
from slackwater.sandbox.snapshots import Snapshots
from slackwater.sandbox.users import Users

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
_DRAIN_READS = 64


@dataclass(frozen=True, slots=True)
class Means:
    """What a supervisor works with, as it was chosen for this machine."""

    backend: Backend
    fences: Fences
    snapshots: Snapshots
    users: Users | None


class Supervisor:
    """`root` holds a folder for each environment."""

    def __init__(self, root: Path, means: Means) -> None:
        self._root = root
        self._means = means
        self._environments: dict[str, Environment] = {}
        self._running: dict[str, Running] = {}
        self._selector = selectors.DefaultSelector()
        self._reports: list[Report] = []
        self._leaving: list[Fence] = []
        self._next_look_s = 0.0
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o711)  # users of environments pass through, and see nothing
        linux.adopt_orphans()
        end_left(str(root))

    # ---- environments ----
    def environments(self) -> list[str]:
        return sorted(self._environments)

    def running(self) -> list[str]:
        return sorted(self._running)

    def open(
        self,
        name: str,
        snapshot: str | None = None,
        files: Mapping[str, bytes] | None = None,
        note: Mapping[str, str | int] | None = None,
    ) -> None:
        """Make an environment, empty or out of a snapshot, with some files; one with a note is kept over a restart."""
        if name in self._environments:
            raise RefusedError(f"environment: {name!r} is open already")
        if not name or name[0] == "." or "/" in name or len(name) > 200:
            raise ConfigError.of("environment", name, "must be a file name")
        users = self._means.users
        user = None if users is None else users.take()
        root = self._root / name
        environment = Environment(name, root, root / "view", user)
        try:
            self._furnish(environment, snapshot, files or {})
            self._means.backend.opened(environment)
            if note is not None:
                environment.note = note
                kept = json.dumps({"snapshot": snapshot, "note": dict(note)})
                (root / "kept.json").write_text(kept)
        except (OSError, SlackwaterError):
            self._demolish(environment)
            raise
        self._environments[name] = environment

    def adopt(self) -> dict[str, Mapping[str, str | int]]:
        """Take over the environments that a supervisor before this one kept here; their notes by name."""
        for root in sorted(self._root.iterdir()):
            try:
                kept = json.loads((root / "kept.json").read_text())
                self._adopt(root, kept["snapshot"], kept["note"])
            except (OSError, ValueError, KeyError, SlackwaterError) as error:
                logger.warning("environment is not kept name=%s why=%s", root.name, error)
                self._demolish(Environment(root.name, root, root / "view", None))
        return {name: environment.note for name, environment in self._environments.items()}

    def _adopt(self, root: Path, snapshot: str | None, note: Mapping[str, str | int]) -> None:
        environment = Environment(root.name, root, root / "view", None, note=note)
        environment.mounted = (root / "upper").is_dir()
        if self._means.users is not None:
            environment.user = self._means.users.adopt(environment.own)
        if environment.mounted:
            if snapshot is None:
                raise NotFoundError("it stands on a snapshot without a name")
            self._means.snapshots.begin(snapshot, root, environment.user)
        self._means.backend.opened(environment)
        self._environments[root.name] = environment

    def _furnish(
        self, environment: Environment, snapshot: str | None, files: Mapping[str, bytes]
    ) -> None:
        root, user = environment.root, environment.user
        root.mkdir()
        root.chmod(0o711)
        environment.tmp.mkdir()
        environment.tmp.chmod(0o700)
        if snapshot is None:
            environment.view.mkdir(mode=0o700)
        else:
            environment.mounted = self._means.snapshots.begin(snapshot, root, user)
        for name, content in files.items():
            self._put(environment, name, content)
        if user is not None:
            for folder in (environment.view, environment.tmp):
                os.chown(folder, user, user)

    def _put(self, environment: Environment, name: str, content: bytes) -> None:
        """Write one file of the owner's, in a view in which nothing has run yet or all is a snapshot's."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise ConfigError.of("files", name, "must be a path inside the environment")
        target = environment.view
        for part in path.parts[:-1]:
            target /= part
            if not target.is_dir() or target.is_symlink():
                target.mkdir()
                self._own(environment, target)
        target /= path.name
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(target, flags, 0o644), "wb") as file:
            file.write(content)
        self._own(environment, target)

    def _own(self, environment: Environment, path: Path) -> None:
        if environment.user is not None:
            os.chown(path, environment.user, environment.user, follow_symlinks=False)

    def snapshot(self, environment: str, name: str) -> None:
        """Keep what the environment has now, for others to begin from."""
        if not name or name[0] == "." or "/" in name or len(name) > 200:
            raise ConfigError.of("snapshot", name, "must be a file name")
        self._means.snapshots.take(name, self._find(environment).view)

    def close_environment(self, name: str) -> None:
        """Take an environment away, with whatever runs in it; those actions still get their report."""
        environment = self._find(name)
        for action, running in list(self._running.items()):
            if running.environment is environment:
                self.stop(action, "its environment was closed")
                select.select([running.child.pidfd], [], [])  # it was killed, so it ends
                self._finish(running)
        del self._environments[name]
        self._demolish(environment)

    def _demolish(self, environment: Environment) -> None:
        self._means.backend.closed(environment)
        if environment.mounted or os.path.ismount(environment.view):
            with contextlib.suppress(OSError):
                linux.unmount(str(environment.view))
        shutil.rmtree(environment.root, ignore_errors=True)
        if environment.user is not None and self._means.users is not None:
            self._means.users.give_back(environment.user)

    def _find(self, name: str) -> Environment:
        found = self._environments.get(name)
        if found is None:
            raise NotFoundError(f"environment: {name!r} is not open here")
        return found

    # ---- actions ----
    def start(self, order: Order) -> None:
        """Run an order; what becomes of it comes out of `step`."""
        asked_s = time.monotonic()
        environment = self._find(order.environment)
        if order.action in self._running:
            raise RefusedError(f"action: {order.action!r} is running already")
        if not order.command or not order.cores:
            raise ConfigError.of("action", order.action, "needs a command and at least one core")
        self._tidy()
        fence = self._means.fences.take(environment.name, environment.user, order.cores)
        try:
            rlimits = fence.rlimits(order.limits)
            launch = self._means.backend.launch(environment, order, rlimits)
            child = fence.start(launch, order.limits)
        except (OSError, SlackwaterError) as error:
            self._means.fences.give_back(fence)
            self._reports.append(
                Over(order.action, End.NOT_STARTED, 127, Usage(), f"it did not start: {error}")
            )
            return
        running = Running(order, environment, fence, child, asked_s)
        self._running[order.action] = running
        self._reports.append(Began(order.action))
        if running.feed():
            child.close_stdin()
        else:
            self._watch(child.stdin, selectors.EVENT_WRITE, running, self._can_feed)
        self._watch(child.stdout, selectors.EVENT_READ, running, self._stdout)
        self._watch(child.stderr, selectors.EVENT_READ, running, self._stderr)
        self._watch(child.pidfd, selectors.EVENT_READ, running, self._finish)

    def stop(self, action: str, reason: str) -> None:
        """Kill an action with everything that it started, if it is running."""
        if (running := self._running.get(action)) is not None:
            self._kill(running, End.STOPPED, reason)

    def watch(self, descriptor: int) -> None:
        """Let `step` return when something else of the driver's can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def step(self, timeout_s: float | None) -> list[Report]:
        """What happened; waits up to `timeout_s` for the first."""
        self._tidy()
        for key, _ in self._selector.select(self._patience_s(timeout_s)):
            if key.data is not None:
                running, handle = key.data
                if self._running.get(running.order.action) is running:
                    handle(running)
        self._look()
        reports, self._reports = self._reports, []
        return reports

    def close(self, keep: bool = False) -> None:
        """End everything that runs, and take environments away; with `keep`, only those without a note."""
        for name, environment in list(self._environments.items()):
            if not keep or not environment.note:
                self.close_environment(name)
        for action, running in list(self._running.items()):
            self.stop(action, "the worker stops")
            select.select([running.child.pidfd], [], [])
            self._finish(running)
        for environment in self._environments.values():
            self._means.backend.closed(environment)
            if environment.mounted:
                with contextlib.suppress(OSError):
                    linux.unmount(str(environment.view))
        self._tidy()
        self._means.backend.close()
        self._means.fences.close()
        self._selector.close()
        if self._means.users is not None:
            self._means.users.close()

    # ---- the loop ----
    def _patience_s(self, timeout_s: float | None) -> float | None:
        if self._reports:
            return 0.0
        now_s = time.monotonic()
        due_s = [running.deadline_s - now_s for running in self._running.values()]
        if self._running:
            due_s.append(self._next_look_s - now_s)
        if timeout_s is not None:
            due_s.append(timeout_s)
        return max(min(due_s), 0.0) if due_s else None

    def _watch(
        self, descriptor: int, events: int, running: Running, handle: Callable[[Running], None]
    ) -> None:
        self._selector.register(descriptor, events, (running, handle))

    def _unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def _can_feed(self, running: Running) -> None:
        if running.feed():
            self._unwatch(running.child.stdin)
            running.child.close_stdin()

    def _stdout(self, running: Running) -> None:
        self._take(running, "stdout")

    def _stderr(self, running: Running) -> None:
        self._take(running, "stderr")

    def _take(self, running: Running, stream: Literal["stdout", "stderr"]) -> bool:
        """Pass on what was printed; whether there may be more."""
        data = running.read(stream)
        if data is None:
            return False
        if not data and not running.is_flooding:
            self._unwatch(getattr(running.child, stream))
            return False
        if data:
            self._reports.append(Printed(running.order.action, stream, data))
        if running.is_flooding and running.killed is None:
            most = running.order.limits.output_bytes
            self._kill(running, End.OUTPUT, f"it printed more than {most} bytes")
        return not running.is_flooding

    def _kill(self, running: Running, end: End, reason: str) -> None:
        if running.killed is None:
            running.killed = (end, reason)
        running.child.kill()
        running.fence.kill_all()

    def _finish(self, running: Running) -> None:
        """Its first process is gone: end the others, read what is in the pipes, report."""
        del self._running[running.order.action]
        running.fence.kill_all()
        self._means.backend.ended(running.environment)
        for stream in ("stdout", "stderr"):
            for _ in range(_DRAIN_READS):
                if not self._take(running, stream):
                    break
        child = running.child
        for descriptor in (child.pidfd, child.stdin, child.stdout, child.stderr):
            if descriptor >= 0:
                self._unwatch(descriptor)
        self._reports.append(running.over())
        child.close()
        self._leaving.append(running.fence)

    def _tidy(self) -> None:
        """What nobody waits for, after a report: the fence is made ready for the next action."""
        leaving, self._leaving = self._leaving, []
        for fence in leaving:
            self._means.fences.give_back(fence)
        if leaving:
            self._reap_orphans()

    def _reap_orphans(self) -> None:
        """Whoever was left without a parent, and has ended; most often there is nobody."""
        try:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
        except ChildProcessError:
            return
        ours = {running.child.pid for running in self._running.values()}
        ours |= self._means.fences.others() | process_tree.helpers
        for pid in process_tree.children(os.getpid()):
            if pid not in ours:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _look(self) -> None:
        """Deadlines, and now and then the disks."""
        now_s = time.monotonic()
        for running in list(self._running.values()):
            if now_s >= running.deadline_s and running.killed is None:
                wall_s = running.order.limits.wall_s
                self._kill(running, End.WALL, f"it ran longer than {wall_s:g} s")
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        for running in list(self._running.values()):
            most = running.order.limits.disk_bytes
            if running.killed is None and _size_bytes(running.environment.own, most) > most:
                self._kill(
                    running, End.DISK, f"its environment has more than {most} bytes of files"
                )


def _size_bytes(folders: tuple[Path, ...], enough: int) -> int:
    """Blocks on disk, and a block for each name; stops counting past `enough`."""
    total, waiting = 0, [str(folder) for folder in folders]
    while waiting and total <= enough:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    found: Any = entry.stat(follow_symlinks=False)
                    total += max(found.st_blocks * 512, 4096)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return total
