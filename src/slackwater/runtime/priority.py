"""Who has a processor, and Python's lock, before whom."""

import contextlib
import os
import sys
from pathlib import Path

_UNDISTURBED_S = 0.001
_FIRST_NICE = -10


def give_way(nice: int, process: int = 0, *, session_nice: int | None = None) -> None:
    """Lower the priority of a process, which must have a session of its own, by so much. Process 0
    is this one.

    Linux may share processors by session first (`sched_autogroup`) and look at `nice` only within
    one, so the session is told as well: the same, or `session_nice`.
    """
    now = os.getpriority(os.PRIO_PROCESS, process)
    os.setpriority(os.PRIO_PROCESS, process, min(now + nice, 19))
    with contextlib.suppress(OSError):
        Path(f"/proc/{process or 'self'}/autogroup").write_text(
            str(nice if session_nice is None else session_nice)
        )


def come_first() -> None:
    """Let this process' session have a processor before others as soon as it can use one, where
    the system allows that; what it starts in sessions of their own is scheduled as usual. A
    session that is shared, such as a terminal's, stays as it is.
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_FIRST_NICE))


class UninterruptedSection:
    """Code of the event loop that is short and should not be cut in pieces: no other thread that
    begins to wait for Python's lock asks for it for a millisecond. Who waits for it already may
    get it once; then the event loop asks for it in its turn.
    """

    def __enter__(self) -> None:
        # Python cuts it off at the microsecond below, and would lose one each time.
        self._interval_s = sys.getswitchinterval() + 0.5e-6
        sys.setswitchinterval(max(self._interval_s, _UNDISTURBED_S))

    def __exit__(self, *_: object) -> None:
        sys.setswitchinterval(self._interval_s)
