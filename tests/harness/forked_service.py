"""A service whose agents, and the templates of their workers, are forked like itself.

Importing what these processes import takes most of the processor time of a service's start, once
for each service and agent of a suite. A program here first forks a process that has the modules,
and puts it in the place of the one that the program would start. Everything else is the program's.

    python -m harness.forked_service slackwater up ...
    python -m harness.forked_service slackwater.worker.agent ...
"""

import asyncio
import functools
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from harness.preloaded_programs import AwaitedProgram, PreloadedPrograms, serve_programs
from slackwater.runtime.launch import agents
from slackwater.sandbox import linux
from slackwater.wire.forked_process import fork, show_command
from slackwater.worker import template

_SELF = "harness.forked_service"
IMPORTED = (
    "slackwater.cli.main",
    "slackwater.cli.up",
    "slackwater.cli.background_start",
    "slackwater.cli.device_preview",
    "slackwater.cli.model_names",
    "slackwater.cli.preflight",
    "slackwater.cli.service_process",
    "slackwater.engine.cpu.executor",
    "slackwater.sandbox.choice",
    "slackwater.serve.front.__main__",
    "slackwater.runtime.net.depot",
    "slackwater.worker.agent",
    "slackwater.worker.coserving_worker",
    "slackwater.worker.engine_worker",
    "slackwater.worker.trainer_worker",
    # What these import when they first need it.
    "cryptography.hazmat.primitives.serialization",
    "encodings.idna",
    "harness.loaded_numba",
    "numpy.ctypeslib",
    "numpy.ma",
    "pydantic.v1",
    "sqlalchemy.dialects.sqlite",
    "uvicorn.lifespan.off",
    "uvloop",
    _SELF,
)
_UP = "slackwater"


@functools.cache
def programs() -> PreloadedPrograms:
    """One for all services, agents and workers that this process starts."""
    return PreloadedPrograms.launch(IMPORTED)


def _fork_agents() -> None:
    """Let the service that this process becomes fork its agents."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def serve() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        linux.die_with_parent(signal.SIGKILL)
        serve_programs(theirs)

    process = fork(serve, [sys.executable, "-m", _SELF, "agents"], [theirs.fileno()])
    theirs.close()
    agents_of_this = PreloadedPrograms(ours, process)

    async def spawn(
        command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> AwaitedProgram:
        arguments = command[2:]
        started = await asyncio.to_thread(
            agents_of_this.start, _SELF, arguments, log, environment=environment, own_session=True
        )
        return AwaitedProgram(started)

    agents._spawn = spawn  # type: ignore[assignment]


def _fork_template() -> None:
    """Let the agent that this process becomes have a template that has imported everything."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", template.__name__]
    process = fork(lambda: template.serve(theirs), command, [theirs.fileno()])
    theirs.close()
    launch_anew: Any = template.WorkerTemplate._launch

    def launch(made: template.WorkerTemplate) -> None:
        if made.process is not None:  # it has ended
            launch_anew(made)
            return
        # As the agent is by now, which began after the fork.
        os.sched_setaffinity(process.pid, os.sched_getaffinity(0))
        os.sched_setscheduler(process.pid, os.sched_getscheduler(0), os.sched_getparam(0))
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, process.pid, nice)
        made.process, made._requests = process, ours
        ours.settimeout(template._ANSWER_S)

    template.WorkerTemplate._launch = launch  # type: ignore[assignment, method-assign]


def main() -> None:
    module = sys.argv[1]
    if module == _UP:
        _fork_agents()
    else:
        os.umask(0o077)  # as the service that it is forked for has it
        _fork_template()
    show_command([sys.executable, "-m", *sys.argv[1:]])
    del sys.argv[0]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
