"""Python programs that are forked from a process that has imported what they import.

The process runs this file; every program then is as `python -m MODULE ARGUMENTS` would be, with the
working directory and the environment of that process.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_REQUEST_BYTES = 1 << 16


class ForkedProgram:
    """A program that was started; `kill` does nothing once it has ended."""

    def __init__(self, report: socket.socket) -> None:
        self._lines = report.makefile()
        self._report = report
        self._pid = int(self._lines.readline())
        self._status: int | None = None

    def wait(self, within_s: float | None = None) -> int:
        """Its exit status."""
        if self._status is None:
            if not select.select([self._report], [], [], within_s)[0]:
                raise TimeoutError(f"a program still runs after {within_s} s")
            self._status = int(self._lines.readline())
            self._lines.close()
            self._report.close()
        return self._status

    def kill(self) -> None:
        if self._status is None and not select.select([self._report], [], [], 0)[0]:
            os.kill(self._pid, signal.SIGKILL)


class PreloadedPrograms:
    """Starts programs that need the modules in `preload`."""

    def __init__(
        self, preload: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *preload],
                cwd=folder,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
            )

    def start(self, module: str, arguments: Sequence[str], output: IO[bytes]) -> ForkedProgram:
        ours, theirs = socket.socketpair()
        with theirs:
            request = json.dumps([module, *arguments]).encode()
            socket.send_fds(self._requests, [request], [theirs.fileno(), output.fileno()])
        return ForkedProgram(ours)

    def close(self) -> None:
        """End the process; the programs have ended."""
        self._requests.close()
        self._process.wait()


def _serve(requests: socket.socket) -> list[str]:
    """Returns the command in each program."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that report
    while True:
        request, descriptors, *_ = socket.recv_fds(requests, _REQUEST_BYTES, 2)
        if not request:
            sys.exit()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if pid := os.fork():
                _report_end(pid, descriptors[0])
            requests.close()
            os.close(descriptors[0])
            os.dup2(descriptors[1], 1)
            os.dup2(descriptors[1], 2)
            command: list[str] = json.loads(request)
            return command
        for descriptor in descriptors:
            os.close(descriptor)


def _report_end(pid: int, report: int) -> None:
    os.write(report, b"%d\n" % pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(report, b"%d\n" % status)
    os._exit(0)


def main() -> None:
    gc.disable()
    descriptor, *preload = sys.argv[1:]
    sys.path[0] = str(Path.cwd())
    for module in preload:
        importlib.import_module(module)
    gc.freeze()
    sys.argv = _serve(socket.socket(fileno=int(descriptor)))
    gc.enable()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
