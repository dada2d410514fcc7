"""Child processes that are forked and keep their parent's modules instead of importing them."""

import asyncio
import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

_TASKS, _DESCRIPTORS = Path("/proc/self/task"), Path("/proc/self/fd")
_LAST_STANDARD = 2


def has_one_thread() -> bool:
    """Whether a fork copies this process whole: false where its threads cannot be counted."""
    return _TASKS.is_dir() and len(list(_TASKS.iterdir())) == 1


class ForkedProcess(Popen[bytes]):
    """A child that was forked, be it by another process; ChildProcessError if it is not ours."""

    def __init__(self, command: list[str], pid: int) -> None:
        self._forked = pid
        super().__init__(command)

    def _execute_child(self, *_: object) -> None:
        os.waitid(os.P_PID, self._forked, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.pid, self._child_created = self._forked, True

    async def wait_in_loop(self) -> int:
        await wait_for_exit(self.pid)
        return self.wait()


async def wait_for_exit(process: int, lives: Callable[[], bool] = lambda: True) -> None:
    """Wait until the kernel tells the event loop that a process has ended; ProcessLookupError if
    there is none. `lives` tells it from another that has got its number.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process)
    loop.add_reader(descriptor, ended.set)
    try:
        if lives():
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def fork(run: Callable[[], None], command: list[str], keep: Sequence[int]) -> ForkedProcess:
    """Run a function in a child that then exits. As after starting a program, the child has the
    standard streams and the descriptors in `keep` only, no input and no signal handlers; it
    shows `command` as its command line.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return ForkedProcess(command, pid)
    status = 1
    try:
        gc.freeze()  # no collection closes a descriptor by a number that is used again
        _close_all_but(keep)
        _reset_signals()
        show_command(command)
        run()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)


def _close_all_but(keep: Sequence[int]) -> None:
    for descriptor in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        if descriptor > _LAST_STANDARD and descriptor not in keep:
            with suppress(OSError):  # the list's own
                os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _reset_signals() -> None:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def show_command(words: list[str]) -> None:
    """Let this process's command line be these words, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    shown = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)
