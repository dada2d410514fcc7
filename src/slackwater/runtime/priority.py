"""Priorities of processes, and of threads that wait for Python's lock."""

import contextlib
import os
import sys
from pathlib import Path

_UNDISTURBED_S = 0.001
_FIRST_NICE = -10


def give_way(nice: int, process: int = 0, *, session_nice: int | None = None) -> None:
    """Lower the priority of a process (0: this one), which must have a session of its own.

    Linux may share processors by session first (`sched_autogroup`), so the session is set as well,
    by the same or by `session_nice`.
    """
    now = os.getpriority(os.PRIO_PROCESS, process)
    os.setpriority(os.PRIO_PROCESS, process, min(now + nice, 19))
    with contextlib.suppress(OSError):
        Path(f"/proc/{process or 'self'}/autogroup").write_text(
            str(nice if session_nice is None else session_nice)
        )


def come_first() -> None:
    """Raise the priority of this process's session where the system allows it. A shared session,
    such as a terminal's, keeps its own.
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_FIRST_NICE))


class UninterruptedSection:
    """Short code of the event loop: other threads that begin to wait for Python's lock now do not
    ask for it for a millisecond.
    """

    def __enter__(self) -> None:
        # Python cuts it off at the microsecond below, and would lose one each time.
        self._interval_s = sys.getswitchinterval() + 0.5e-6
        sys.setswitchinterval(max(self._interval_s, _UNDISTURBED_S))

    def __exit__(self, *_: object) -> None:
        sys.setswitchinterval(self._interval_s)
