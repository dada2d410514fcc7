"""A supervisor on a folder of its own, for tests: run one command and see what became of it."""

import ctypes
import itertools
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slackwater.sandbox import process_tree
from slackwater.sandbox.backends.bubblewrap import find_bubblewrap
from slackwater.sandbox.backends.docker import DEFAULT_IMAGE
from slackwater.sandbox.backends.port import Order
from slackwater.sandbox.choice import BackendName, choose
from slackwater.sandbox.fences import PinnedFences
from slackwater.sandbox.file_tasks import delete
from slackwater.sandbox.limits import Limits
from slackwater.sandbox.reports import ActionEnded, OutputPrinted, Report, SnapshotEnded
from slackwater.sandbox.supervisor import SandboxPlatform, SandboxSupervisor
from slackwater.sandbox.users import open_user_pool

ENDS_WITHIN_S = 240.0
SPARE_USER = 64_123  # nobody's
_PR_SET_DUMPABLE = 4
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of one command."""

    over: ActionEnded
    stdout: str
    stderr: str


class Stage:
    """Runs commands to their end, one at a time."""

    def __init__(
        self, supervisor: SandboxSupervisor, platform: SandboxPlatform, root: Path
    ) -> None:
        self.supervisor = supervisor
        self.platform = platform
        self.root = root
        self._actions = itertools.count()

    def restart(self) -> None:
        """Another supervisor takes over, as after the end of one that was killed between
        two steps.
        """
        self.supervisor._workers.close()
        self.supervisor._selector.close()
        self.supervisor = SandboxSupervisor(self.root / "environments", self.platform)

    def start(self, *command: str, environment: str = "e", **limits: Any) -> str:
        given = dict(limits)
        more = {key: given.pop(key) for key in ("stdin", "variables") if key in given}
        cores = frozenset(given.pop("cores", {min(os.sched_getaffinity(0))}))
        action = f"action-{next(self._actions)}"
        order = Order(
            action=action,
            environment=environment,
            command=command,
            cores=cores,
            limits=replace(Limits(wall_s=120.0, processes=64), **given),
            **more,
        )
        self.supervisor.start(order)
        return action

    def run(self, *command: str, **given: Any) -> Ran:
        return self.until_over(self.start(*command, **given))

    def sh(self, script: str, **given: Any) -> Ran:
        return self.run("/bin/sh", "-c", script, **given)

    def snapshot(self, environment: str, name: str, most_bytes: int | None = None) -> str | None:
        """Take a snapshot and wait for it; why it was not kept, or None."""
        self.supervisor.snapshot(environment, name, most_bytes)
        ended = self.until(lambda report: isinstance(report, SnapshotEnded) and report.name == name)
        assert isinstance(ended, SnapshotEnded)
        return ended.error

    def until(self, is_it: Callable[[Report], bool]) -> Report:
        """The first report of some kind."""
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while time.monotonic() < deadline_s:
            for report in self.supervisor.step(1.0):
                if is_it(report):
                    return report
        raise AssertionError("no such report came")

    def step_until(self, is_so: Callable[[], bool]) -> None:
        """Let the supervisor go on until something is so."""
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while not is_so():
            assert time.monotonic() < deadline_s
            self.supervisor.step(0.05)

    def until_over(self, action: str) -> Ran:
        printed: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while time.monotonic() < deadline_s:
            for report in self.supervisor.step(1.0):
                if isinstance(report, OutputPrinted) and report.action == action:
                    printed[report.stream] += report.data
                if isinstance(report, ActionEnded) and report.action == action:
                    return Ran(report, printed["stdout"].decode(), printed["stderr"].decode())
        raise AssertionError(f"{action} did not end")


@contextmanager
def a_stage(
    backend: BackendName,
    pinned: bool = False,
    image: str = DEFAULT_IMAGE,
    *,
    allowed: Sequence[str] = (),
) -> Iterator[Stage]:
    """On a folder that other users can pass through, as environments' users must."""
    root = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="slackwater-test-"))
    root.chmod(0o711)
    name = f"test-{os.getpid()}-{next(_numbers)}"
    platform = choose(name, root, backend, image, allowed=allowed).platform
    if pinned:
        platform.fences.close()
        platform = replace(platform, fences=PinnedFences())
    stage = Stage(SandboxSupervisor(root / "environments", platform), platform, root)
    try:
        yield stage
    finally:
        stage.supervisor.close()
        delete(str(root.parent), root.name)


def run_without_root(case: Callable[[], None]) -> None:
    """Run a test case as somebody who is not root."""

    def work() -> str:
        if not os.access(sys.base_prefix, os.X_OK):  # root's own Python
            sys.prefix = sys.base_prefix = "/usr"
        case()
        return ""

    assert as_non_root(work) == ""


def bubblewrap_missing() -> str | None:
    """Why bubblewrap cannot be tested here, or None."""
    users = open_user_pool()
    program, why = find_bubblewrap(None if users is None else users.allocate())
    if users is not None:
        users.close()
    return None if program is not None else why


def processes_with(marker: str) -> list[int]:
    """Live processes whose command line has a marker in it."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ")
                state = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if marker.encode() in line and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until_gone(marker: str, within_s: float = 60.0) -> list[int]:
    """What is left of the marked processes once they had time to go."""
    deadline_s = time.monotonic() + within_s
    while (left := processes_with(marker)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return left


def as_non_root(work: Callable[[], str]) -> str:
    """What `work` says, in a process without root's rights; its error, if it fails."""
    if os.getuid() != 0:
        return work()
    heard, said = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(heard)
            process_tree.helpers.clear()
            os.setgroups([])
            os.setresgid(SPARE_USER, SPARE_USER, SPARE_USER)
            os.setresuid(SPARE_USER, SPARE_USER, SPARE_USER)
            # A change of user makes the process's files in /proc root's, until it runs a program.
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
            os.chdir("/")
            os.write(said, work().encode())
        except BaseException:  # noqa: BLE001  (it must not get into the tests around it)
            os.write(said, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(0)
    os.close(said)
    told = b""
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    try:
        while select.select([heard], [], [], max(deadline_s - time.monotonic(), 0.0))[0]:
            if not (more := os.read(heard, 1 << 16)):
                return told.decode()
            told += more
        raise AssertionError(f"it did not end; so far it said {told!r}")
    finally:
        os.close(heard)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
