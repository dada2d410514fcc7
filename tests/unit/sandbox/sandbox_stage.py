"""A supervisor on a folder of its own, for tests: run one command and see what became of it."""

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slackwater.sandbox.backends.bubblewrap import find_bubblewrap
from slackwater.sandbox.backends.docker import DEFAULT_IMAGE
from slackwater.sandbox.backends.port import Order
from slackwater.sandbox.choice import BackendName, choose
from slackwater.sandbox.fences import PinnedFences
from slackwater.sandbox.limits import Limits
from slackwater.sandbox.reports import Over, Printed
from slackwater.sandbox.supervisor import Means, Supervisor
from slackwater.sandbox.users import users_here

ENDS_WITHIN_S = 240.0
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of one command."""

    over: Over
    stdout: str
    stderr: str


class Stage:
    """Runs commands to their end, one at a time."""

    def __init__(self, supervisor: Supervisor, means: Means, root: Path) -> None:
        self.supervisor = supervisor
        self.means = means
        self.root = root
        self._actions = itertools.count()

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

    def until_over(self, action: str) -> Ran:
        printed: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while time.monotonic() < deadline_s:
            for report in self.supervisor.step(1.0):
                if isinstance(report, Printed) and report.action == action:
                    printed[report.stream] += report.data
                if isinstance(report, Over) and report.action == action:
                    return Ran(report, printed["stdout"].decode(), printed["stderr"].decode())
        raise AssertionError(f"{action} did not end")


@contextmanager
def a_stage(
    backend: BackendName, pinned: bool = False, image: str = DEFAULT_IMAGE
) -> Iterator[Stage]:
    """On a folder that other users can pass through, as environments' users must."""
    root = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="slackwater-test-"))
    root.chmod(0o711)
    means = choose(f"test-{os.getpid()}-{next(_numbers)}", root, backend, image).means
    if pinned:
        means.fences.close()
        means = replace(means, fences=PinnedFences())
    supervisor = Supervisor(root / "environments", means)
    try:
        yield Stage(supervisor, means, root)
    finally:
        supervisor.close()
        shutil.rmtree(root)


def bubblewrap_missing() -> str | None:
    """Why bubblewrap cannot be tested here, or None."""
    users = users_here()
    program, why = find_bubblewrap(None if users is None else users.take())
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
