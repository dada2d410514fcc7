"""The sandbox process: holds environments, runs the actions that it is told to run, and reports.

One thread: it forks, and a process that forks must have no other. So it beats its heart between two looks at the
pipes. It decides nothing; cores and limits come with each action.

When the control plane goes, everything that runs is killed and the environments stay on disk, for the next one.
"""

import argparse
import contextlib
import logging
import signal
import time
from pathlib import Path

from slackwater.model.errors import SlackwaterError
from slackwater.sandbox.backends.docker import DEFAULT_IMAGE
from slackwater.sandbox.backends.port import Order
from slackwater.sandbox.choice import Chosen, choose, keep_mounts_private
from slackwater.sandbox.limits import Limits
from slackwater.sandbox.reports import Began, End, Over, Printed, Report, Usage
from slackwater.sandbox.supervisor import Supervisor
from slackwater.wire import messages, sandbox
from slackwater.worker.connection import Connection
from slackwater.worker.process import dial, run_worker, secret
from slackwater.worker.sandbox_node import (
    cores_by_numa,
    folder_for_all,
    memory_mib,
    parse_share,
)

logger = logging.getLogger(__name__)

_ONE_OFF = "once-"


class SandboxWorker:
    """Between one connection and one supervisor."""

    def __init__(self, connection: Connection, supervisor: Supervisor) -> None:
        self._connection = connection
        self._supervisor = supervisor
        self._streamed: set[str] = set()
        self._printed: dict[str, list[sandbox.ActionPrinted]] = {}
        self._one_off: dict[str, str] = {}
        self._next_beat_s = 0.0

    def run(self) -> None:
        """Until told to stop."""
        self._supervisor.watch(self._connection.fileno())
        while True:
            self._beat()
            patience_s = max(self._next_beat_s - time.monotonic(), 0.0)
            for report in self._supervisor.step(patience_s):
                self._tell(report)
            while came := self._connection.receive(0.0):
                for message in came:
                    if isinstance(message, messages.Stop):
                        return
                    self._do(message)

    def _beat(self) -> None:
        if time.monotonic() >= self._next_beat_s:
            gauges = {
                "running": float(len(self._supervisor.running())),
                "environments": float(len(self._supervisor.environments())),
            }
            self._send(messages.Heartbeat(gauges))
            self._next_beat_s = time.monotonic() + self._connection.heartbeat_every_s

    def _send(self, *said: messages.Message) -> None:
        self._connection.send(*(messages.encode(message) for message in said))

    # ---- what it is told ----
    def _do(self, message: messages.ToWorker) -> None:
        match message:
            case sandbox.RunAction():
                self._start(message)
            case sandbox.StopAction(attempt, reason):
                self._supervisor.stop(str(attempt), reason)
            case sandbox.OpenEnvironment():
                self._open(message)
            case sandbox.CloseEnvironment(environment):
                with contextlib.suppress(SlackwaterError):  # it may have failed to open
                    self._supervisor.close_environment(environment)
            case sandbox.KeepSnapshot(request, environment, name):
                error = None
                try:
                    self._supervisor.snapshot(environment, name)
                except (OSError, SlackwaterError) as fault:
                    error = str(fault)
                self._send(sandbox.SnapshotKept(request, error))
            case _:
                logger.warning("not for a sandbox: %s", type(message).__name__)

    def _open(self, message: sandbox.OpenEnvironment) -> None:
        note: dict[str, str | int] = {"job": message.job, "memory_mib": message.memory_mib}
        try:
            self._supervisor.open(message.environment, message.snapshot, message.files, note)
        except (OSError, SlackwaterError) as error:
            self._send(sandbox.EnvironmentFailed(message.environment, str(error)))
        else:
            self._send(sandbox.EnvironmentReady(message.environment))

    def _start(self, message: sandbox.RunAction) -> None:
        action = str(message.attempt)
        environment = message.environment
        try:
            if environment is None:
                environment = self._one_off[action] = f"{_ONE_OFF}{action}"
                self._supervisor.open(environment)
            limits = message.limits
            order = Order(
                action=action,
                environment=environment,
                command=message.command,
                cores=frozenset(message.cores),
                limits=Limits(
                    wall_s=limits.wall_s,
                    output_bytes=limits.output_bytes,
                    memory_bytes=limits.memory_bytes,
                    processes=limits.processes,
                    disk_bytes=limits.disk_bytes,
                    network=limits.network,
                ),
                variables=message.variables,
                stdin=message.stdin,
            )
            if message.stream:
                self._streamed.add(action)
            self._supervisor.start(order)
        except (OSError, SlackwaterError) as error:
            self._tell(Over(action, End.NOT_STARTED, 127, Usage(), str(error)))

    # ---- what it tells ----
    def _tell(self, report: Report) -> None:
        """What an action prints goes out at once if somebody listens, else together with its end."""
        match report:
            case Began():
                return
            case Printed(action, stream, data):
                printed = sandbox.ActionPrinted(int(action), stream, data)
                if action in self._streamed:
                    self._send(printed)
                else:
                    self._printed.setdefault(action, []).append(printed)
            case Over(action, end, status, usage, reason):
                over = sandbox.ActionOver(
                    attempt=int(action),
                    end=end.value,
                    status=status,
                    reason=reason,
                    launch_s=usage.launch_s,
                    run_s=usage.run_s,
                    cpu_s=usage.cpu_s,
                    max_rss_bytes=usage.max_rss_bytes,
                )
                self._streamed.discard(action)
                self._send(*self._printed.pop(action, []), over)
                one_off = self._one_off.pop(action, None)
                if one_off in self._supervisor.environments():
                    assert one_off is not None
                    self._supervisor.close_environment(one_off)


def _facts(
    options: argparse.Namespace, chosen: Chosen, supervisor: Supervisor
) -> sandbox.SandboxFacts:
    held = [
        sandbox.HeldEnvironment(name, str(note["job"]), int(note["memory_mib"]))
        for name, note in supervisor.adopt().items()
    ]
    share = parse_share(options.share)
    return sandbox.SandboxFacts(
        node=options.node,
        cores=cores_by_numa(options.cores, share),
        memory_mib=options.memory_mib or memory_mib(share),
        backend=chosen.means.backend.name,
        said=list(chosen.said),
        environments=held,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A sandbox worker; a node's agent starts it.")
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="the control plane")
    parser.add_argument("--worker", required=True, help="this worker's name")
    parser.add_argument("--files", help="not needed: a sandbox gets no files of the service")
    parser.add_argument("--relay", help="not needed either")
    parser.add_argument("--service", required=True, help="tells services of one machine apart")
    parser.add_argument(
        "--node", required=True, help="its name as a node, the same after a restart"
    )
    parser.add_argument("--folder", type=Path, help="where environments live; default: by itself")
    parser.add_argument("--cores", default="", help="core numbers, such as 0-3,8; default: all")
    parser.add_argument("--share", default="0/1", help="which share of cores and memory: 0/2, 1/2")
    parser.add_argument("--memory-mib", type=int, default=0, help="for environments; default: most")
    parser.add_argument("--backend", default="auto", help="auto, process, bubblewrap or docker")
    parser.add_argument("--image", default=DEFAULT_IMAGE, help="image of docker's containers")
    return parser.parse_args()


def main() -> None:
    options = _options()
    keep_mounts_private()
    name = f"{options.service}-{options.node}"
    folder = (options.folder or folder_for_all(options.service)) / options.node
    chosen = choose(name, folder, options.backend, options.image)
    for line in chosen.said:
        logger.info("%s", line)
    supervisor = Supervisor(folder / "environments", chosen.means)
    try:
        facts = _facts(options, chosen, supervisor)
        hello = messages.Hello(secret(), options.worker, "sandbox", sandbox=facts)
        SandboxWorker(dial(options.connect, hello), supervisor).run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is leaving already
        supervisor.close(keep=True)


if __name__ == "__main__":
    run_worker(main, cleans_up=True)
