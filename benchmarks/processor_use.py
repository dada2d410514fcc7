"""Processor time by what it is used for: each process of a service and of its jobs' drivers, as the
system accounts for it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

PLANE = "plane"
FRONT = "front"
ENGINE = "engine"
# A part of the command line, and what a process with it is.
_ROLES = (
    ("slackwater.worker.engine_worker", ENGINE),
    ("slackwater.worker.trainer_worker", "trainer"),
    ("slackwater.worker.sandbox_worker", "sandbox"),
    ("slackwater.worker.agent", "agents"),
    ("slackwater.runtime.services.helper_processes", "helpers"),
    ("slackwater.serve.front", FRONT),
    ("grpo_driver", "drivers"),
)
HOST = "host"  # took it away from a virtual machine
_NOT_BESIDE = (ENGINE, "trainer", HOST)
_SCHEDULER = 2  # CPUCLOCK_SCHED


def role_of(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((role for part, role in _ROLES if part in line), "others")


@dataclass(slots=True)
class ProcessorUse:
    """Follows a service by its process id; `also` are more processes, such as drivers. `with_ended`
    counts a process that has ended with the one that waited for it.
    """

    service: int
    role_of: Callable[[psutil.Process], str] = role_of
    with_ended: bool = False
    _roots: dict[int, psutil.Process] = field(default_factory=dict)

    def seconds(self, also: tuple[int, ...] = ()) -> dict[str, float]:
        """So far, by role. A virtual machine's host is a role too."""
        found: dict[str, float] = {HOST: getattr(psutil.cpu_times(), "steal", 0.0)}
        for process in self._processes((self.service, *also)):
            try:
                used_s = _used_s(process)
                if self.with_ended:
                    ended = process.cpu_times()
                    used_s += ended.children_user + ended.children_system
                role = PLANE if process.pid == self.service else self.role_of(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
            found[role] = found.get(role, 0.0) + used_s
        return found

    def _processes(self, roots: tuple[int, ...]) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for pid in roots:
            try:
                root = self._roots.setdefault(pid, psutil.Process(pid))
                found += [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
        return found


def _used_s(process: psutil.Process) -> float:
    """User and system time by the scheduler's clock: ticks of 10 ms are too coarse for requests."""
    if not psutil.LINUX:
        times = process.cpu_times()
        return float(times.user + times.system)
    try:
        return time.clock_gettime(~process.pid << 3 | _SCHEDULER)  # as clock_getcpuclockid(3) does
    except OSError:  # EINVAL of a process that has ended
        raise ProcessLookupError(process.pid) from None


def beside_phases(used: dict[str, float]) -> float:
    """What was used by everybody here but the workers that permits are for."""
    return sum(seconds for role, seconds in used.items() if role not in _NOT_BESIDE)
