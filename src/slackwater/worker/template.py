"""A process that has imported what compute workers import, and is forked for each of them.

Importing PyTorch takes seconds of processor time; a fork takes a hundredth of one and shares the
modules' memory. The template computes nothing, touches no device, has one thread and learns no key.
It forks a process that forks the worker and exits, so that the agent adopts the worker: status,
signals and death with the agent are those of a process that the agent started. Workers outlive the
template. `python -m slackwater.worker.template DESCRIPTOR`, and room for a worker's command line.
"""

import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
from subprocess import DEVNULL, Popen

from slackwater.sandbox import linux
from slackwater.wire.forked_process import ForkedProcess, has_one_thread, show_command
from slackwater.worker.process import run_worker

_FORKED = ("trainer_worker", "engine_worker", "coserving_worker", "reward_worker")
_ROOM = " " * 4000
_SHORT_BYTES = 256
_ANSWER_S = 600.0  # beside a load of 20 the imports took more than two minutes


class WorkerTemplate:
    """The agent's end of the template, which starts with the first worker that is forked."""

    def __init__(self) -> None:
        self.process: Popen[bytes] | None = None

    def start(self, command: list[str], environment: dict[str, str], log: int) -> Popen[bytes]:
        """Run `python -m MODULE ...`: forked if MODULE imports PyTorch and a fork works here.

        Hazard: workers are killed when the *thread* that started them ends, so only the main
        thread starts any.
        """
        if command[2].endswith(_FORKED):
            try:
                # Not for longer: what workers leave behind would become our zombies.
                linux.adopt_orphans()
                return self._fork(command, environment, log)
            except OSError as error:
                self.close()
                logging.getLogger(__name__).warning("not forked: %s (%s)", command[2], error)
            finally:
                linux.adopt_orphans(adopt=False)
        return Popen(command, stdin=DEVNULL, stdout=log, stderr=log, env=environment)

    def _fork(self, command: list[str], environment: dict[str, str], log: int) -> Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self._launch()
        ours, theirs = socket.socketpair()
        ours.settimeout(_ANSWER_S)
        with ours:
            with theirs:
                socket.send_fds(self._requests, [command[2].encode()], [theirs.fileno(), log])
            if not self._requests.recv(1):
                raise ConnectionError("the process that workers are forked from has ended")
            worker = ForkedProcess(command, int(ours.recv(_SHORT_BYTES) or 0))
            ours.sendall(json.dumps([command, environment]).encode())
        return worker

    def _launch(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(_ANSWER_S)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), _ROOM]
            self.process = Popen(command, stdin=DEVNULL, pass_fds=[theirs.fileno()])

    def close(self) -> None:
        """End the template; its workers live on."""
        if self.process is not None:
            self._requests.close()
            self.process.kill()
            self.process.wait()
            self.process = None


def _serve(requests: socket.socket) -> socket.socket:
    """Fork until the agent has gone; returns in each worker, with its channel to the agent."""
    while True:
        module, descriptors, *_ = socket.recv_fds(requests, _SHORT_BYTES, 2)
        if not module:
            sys.exit()
        importlib.import_module(module.decode())  # if it fails, the agent starts the worker anew
        load_compiler()
        if not has_one_thread():
            sys.exit("importing has started a thread, which a fork would not copy")
        gc.freeze()  # a worker's collections would write to memory that is shared
        if not (between := os.fork()):
            if os.fork():
                os._exit(0)
            requests.close()
            channel, log = descriptors
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            return socket.socket(fileno=channel)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(b".")  # the worker is the agent's now


def load_compiler() -> None:
    """Import what numba else imports in each worker, with the first compiled loop that it calls."""
    if "numba" in sys.modules:
        from numba.core.registry import cpu_target

        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()


def main() -> None:
    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(requests: socket.socket) -> None:
    # A batch scheduler and Ctrl-C signal every process, but this one ends with its agent.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    linux.die_with_parent(signal.SIGKILL)
    gc.disable()  # a tenth of the time that the imports take
    with _serve(requests) as channel, channel.makefile() as told:
        channel.sendall(str(os.getpid()).encode())
        command, environment = json.load(told)
    gc.enable()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command[2:]
    show_command(command)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    run_worker(importlib.import_module(command[2]).main)


if __name__ == "__main__":
    main()
