"""A node's agent: dials the control plane, starts and ends the node's workers, and says what became of them.

    python -m slackwater.worker.agent --connect HOST:PORT --node NAME --files folder:DIRECTORY | URL=CACHE --logs FOLDER

The fleet's secret comes in the environment, never on the command line. When the control plane has gone, the agent ends its workers:
nothing that they do then would be kept. With `--redial` it tries again until it is told to stop, and the node comes back
empty; without, it leaves.
"""

import argparse
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from slackwater.model.errors import UnavailableError
from slackwater.wire import agent as says
from slackwater.wire import messages
from slackwater.worker.connection import Connection, DisconnectedError
from slackwater.worker.process import address_of, pin, run_worker, secret

logger = logging.getLogger(__name__)

_BY_HAND = "--by-hand"
_LEAVE_S = 5.0
_TAIL_BYTES = 16 << 10
_LONGEST_PAUSE_S = 10.0


class NodeAgent:
    """The workers of one node while one connection lasts."""

    def __init__(self, connection: Connection, connect: str, files: str, logs: Path) -> None:
        self._connection = connection
        self._connect = connect
        self._files = files
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        """Until told to stop; DisconnectedError when the control plane has gone."""
        while True:
            for message in self._connection.receive(None):
                match message:
                    case messages.Stop():
                        return
                    case says.StartWorker():
                        self._start(message)
                    case says.SignalWorker(worker, number):
                        self._signal(worker, number)
                    case _:
                        logger.warning("not for an agent: %s", type(message).__name__)

    def end_workers(self) -> None:
        """Ask every worker to leave, then make it."""
        with self._lock:
            left = list(self._processes.values())
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline_s = time.monotonic() + _LEAVE_S
        for process in left:
            try:
                process.wait(max(deadline_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, order: says.StartWorker) -> None:
        arguments = ["--connect", self._connect, "--worker", order.worker, "--files", self._files]
        # Threads that wait by spinning take the cores from each other: on a busy machine a pass took ten times the CPU time.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"OMP_NUM_THREADS": "1"}
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            path = self._logs / f"{order.log}.log"
            with path.open("ab") as log:
                before = log.tell()
                # Hazard: workers are killed when the *thread* that started them ends, so only the main thread starts any.
                process = subprocess.Popen(
                    [sys.executable, "-m", order.module, *arguments, *order.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                )
        except OSError as error:
            self._tell(says.WorkerNotStarted(order.worker, str(error)))
            return
        with self._lock:
            self._processes[order.worker] = process
        self._tell(says.WorkerStarted(order.worker, process.pid))
        told = (order.worker, process, path, before)
        waiting = threading.Thread(target=self._wait, args=told, daemon=True)
        waiting.start()

    def _wait(
        self, worker: str, process: "subprocess.Popen[bytes]", log: Path, before: int
    ) -> None:
        status = process.wait()
        with self._lock:
            self._processes.pop(worker, None)
        with contextlib.suppress(DisconnectedError):
            said = last_words(log, before) if status > 0 else ""
            self._tell(says.WorkerEnded(worker, status, said))

    def _signal(self, worker: str, number: int) -> None:
        with self._lock:
            process = self._processes.get(worker)
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def _tell(self, message: messages.Message) -> None:
        self._connection.send(messages.encode(message))


def last_words(log: Path, after: int) -> str:
    """The last line of a log after a place, without the time and name that logging puts before it."""
    try:
        with log.open("rb") as file:
            file.seek(max(after, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    _, error, message = last.partition(" ERROR ")
    return message.partition(" ")[2] if error else last


def _facts(options: argparse.Namespace) -> says.NodeFacts:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return says.NodeFacts(
        node=options.node,
        pool=options.pool,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        memory_mb=pages * page_bytes >> 20,
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def serve_once(options: argparse.Namespace) -> None:
    """One connection, from the hello to its end."""
    hello = messages.Hello(secret(), f"agent:{options.node}", "agent", node=_facts(options))
    hung_up = threading.Event()
    address = address_of(options.connect)
    with Connection(address, hello, pin=pin(), orphaned=hung_up.set) as connection:
        agent = NodeAgent(connection, options.connect, options.files, Path(options.logs))
        try:
            agent.run()
        finally:
            agent.end_workers()


def main() -> None:
    parser = argparse.ArgumentParser(description="A node's agent; `slackwater agent` starts it.")
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="the control plane")
    parser.add_argument("--node", required=True, help="this node's name in the fleet")
    parser.add_argument("--pool", help="the pool of the fleet file that the node belongs to")
    parser.add_argument("--files", required=True, help="folder:DIRECTORY, or URL=CACHE of a depot")
    parser.add_argument("--logs", required=True, help="folder for the workers' output")
    parser.add_argument("--redial", action="store_true", help="try again when the plane has gone")
    parser.add_argument(_BY_HAND, action="store_true", help="outlive whoever started it")
    options = parser.parse_args()
    pause_s = 0.5
    while True:
        began_s = time.monotonic()
        try:
            serve_once(options)
            return
        except (DisconnectedError, UnavailableError) as error:
            if not options.redial or "refused this worker" in str(error):
                raise
            pause_s = 0.5 if time.monotonic() - began_s > 30 else min(2 * pause_s, _LONGEST_PAUSE_S)
            logger.warning("%s; trying again in %.1f s", error, pause_s)
            time.sleep(pause_s)


if __name__ == "__main__":
    run_worker(main, by_hand=_BY_HAND in sys.argv)
