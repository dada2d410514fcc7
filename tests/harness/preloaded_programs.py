"""Python programs that are forked from a process that has imported what they import.

The process runs this file; every program then is as `python -m MODULE ARGUMENTS` would be, and a
child of whoever asks for it.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from slackwater.sandbox import linux
from slackwater.wire.forked_process import ForkedProcess, show_command

_ROOM = " " * 4000  # for a program's command line
_SHORT_BYTES = 256
_IMPORTED_WITHIN_S = 600.0
_SESSION, _OWN_SESSION = b".", b"s"
# Read by libraries at their import, for the programs: a fork would lose threads of NumPy's, and the
# others are as the agents of workers set them.
_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

_adoption = threading.Lock()


class PreloadedPrograms:
    """Starts programs from a process that serves them, at the other end of `requests`."""

    def __init__(self, requests: socket.socket, process: "subprocess.Popen[bytes]") -> None:
        self._requests, self._process = requests, process

    @classmethod
    def launch(
        cls, preload: Sequence[str], environment: Mapping[str, str] = os.environ
    ) -> "PreloadedPrograms":
        """Start a process that imports the modules in `preload`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), ",".join(preload), _ROOM],
                stdin=subprocess.DEVNULL,
                env={**environment, **_THREADS},
                pass_fds=[theirs.fileno()],
            )
        return cls(ours, process)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        output: IO[bytes],
        *,
        environment: Mapping[str, str] = os.environ,
        folder: Path | None = None,
        own_session: bool = False,
    ) -> ForkedProcess:
        """Start a program in this folder, or in this process's own."""
        command = [sys.executable, "-m", module, *arguments]
        told = [command, str(folder or Path.cwd()), dict(environment)]
        request = _OWN_SESSION if own_session else _SESSION
        ours, theirs = socket.socketpair()
        with ours, _adopting_orphans():
            with theirs:
                socket.send_fds(self._requests, [request], [theirs.fileno(), output.fileno()])
            self._requests.settimeout(_IMPORTED_WITHIN_S)
            assert self._requests.recv(1), f"{module}: what it imports cannot be imported"
            program = ForkedProcess(command, int(ours.recv(_SHORT_BYTES)))
            ours.sendall(json.dumps(told).encode())
        return program

    def close(self) -> None:
        """End the process; programs live on."""
        self._requests.close()
        self._process.wait()


class AwaitedProgram:
    """A program whose end an event loop waits for."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process, self.pid = process, process.pid
        self.send_signal, self.kill = process.send_signal, process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        status = self.returncode
        return await self._process.wait_in_loop() if status is None else status


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Not for longer: what other processes leave behind would become our zombies."""
    with _adoption:  # the whole process adopts, or does not
        linux.adopt_orphans()
        try:
            yield
        finally:
            linux.adopt_orphans(adopt=False)


def _serve(requests: socket.socket) -> socket.socket:
    """Returns in each program, with its channel to whoever asked for it."""
    while True:
        request, descriptors, *_ = socket.recv_fds(requests, 1, 2)
        if not request:
            os._exit(0)
        if not (between := os.fork()):
            if os.fork():
                os._exit(0)
            if request == _OWN_SESSION:
                os.setsid()
            requests.close()
            channel, output = descriptors
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            return socket.socket(fileno=channel)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(b".")  # the program is a child of whoever asked now


def serve_programs(requests: socket.socket) -> None:
    """Fork programs until nobody can ask for more; returns when one has ended."""
    gc.freeze()
    with _serve(requests) as channel, channel.makefile() as told:
        channel.sendall(str(os.getpid()).encode())
        command, folder, environment = json.load(told)
    gc.enable()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv = command[2:]
    show_command(command)
    warnings.filterwarnings("ignore", message=".* found in sys.modules after import of package")
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        if not isinstance(leaving.code, int | None):
            raise
        _exit(leaving.code or 0)


def _exit(status: int) -> NoReturn:
    """Exit without taking apart all the modules, which takes longer than a short program."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    gc.disable()
    sys.path[:1] = [str(Path.cwd()), str(Path(__file__).parents[1])]
    for module in sys.argv[2].split(","):
        importlib.import_module(module)
    serve_programs(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
