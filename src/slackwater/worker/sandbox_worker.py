"""The sandbox process: holds environments, runs actions, and reports.

Hazard: it forks, so it has one thread and sends heartbeats between two polls. It decides nothing;
cores and limits come with each action. When the control plane is lost, running actions are killed
and environments stay on disk. A failing request never ends the worker: the failure is logged and
answered.
"""

import argparse
import contextlib
import gc
import logging
import os
import signal
import tempfile
import time
from collections import deque
from pathlib import Path

import msgspec

from slackwater.model.errors import ConfigError, RefusedError, SlackwaterError
from slackwater.sandbox.backends.docker import DEFAULT_IMAGE
from slackwater.sandbox.backends.port import Order
from slackwater.sandbox.choice import SandboxChoice, choose, keep_mounts_private
from slackwater.sandbox.launch import LAUNCHER_FOLDER
from slackwater.sandbox.limits import Limits
from slackwater.sandbox.reports import (
    ActionEnded,
    End,
    EnvironmentCreated,
    EnvironmentCreationFailed,
    OutputPrinted,
    Report,
    SnapshotEnded,
    Usage,
)
from slackwater.sandbox.supervisor import SandboxSupervisor
from slackwater.wire import messages, sandbox
from slackwater.wire.memory import MEMORY_GAUGE, resident_bytes, trim_heap
from slackwater.worker.connection import TRIM_EVERY_S, Connection, DisconnectedError
from slackwater.worker.node_devices import numa_nodes, parse_cores
from slackwater.worker.process import dial, run_worker

_ENVIRONMENT_SHARE = 0.8
logger = logging.getLogger(__name__)
_ONE_OFF = "once-"
_MAX_REASON_CHARS = 4000
_MAX_FAILURES = 256
_MAX_FINISHED = 16


def parse_share(text: str) -> tuple[int, int]:
    """`1/2`: the second of two."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise ConfigError.of("--share", text, "must be NUMBER/COUNT, such as 0/2")
    return int(number), int(count)


def cores_by_numa(selection: str, share: tuple[int, int]) -> list[list[int]]:
    """This worker's share of the (wanted) cores, by NUMA node."""
    allowed = set(os.sched_getaffinity(0))
    if selection:
        try:
            selected = parse_cores(selection)
        except ValueError:
            fix = "must be numbers and ranges, such as 0-3,8"
            raise ConfigError.of("--cores", selection, fix) from None
        if not selected <= allowed:
            raise ConfigError.of(
                "--cores", selection, f"must be of this machine's: {sorted(allowed)}"
            )
        allowed = selected
    number, count = share
    allowed = set(sorted(allowed)[number::count])
    if not allowed:
        raise ConfigError.of("--share", f"{number}/{count}", "leaves this worker no core")
    result = []
    for cores in numa_nodes().values():
        if here := cores & allowed:
            result.append(sorted(here))
            allowed -= here
    return [*result, sorted(allowed)] if allowed else result


def memory_mib(share: tuple[int, int]) -> int:
    """Memory for environments: most of the machine's, the rest is for the system."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * _ENVIRONMENT_SHARE) // share[1] >> 20


def default_folder(service: str) -> Path:
    """Default folder of environments, outside root's home, which other users cannot enter."""
    if os.getuid() == 0:
        return Path("/var/tmp") / f"slackwater-{service}"
    return Path(tempfile.gettempdir()) / f"slackwater-{os.getuid()}-{service}"


class SandboxWorker:
    """Connects one supervisor to the control plane."""

    def __init__(self, connection: Connection, supervisor: SandboxSupervisor) -> None:
        self._connection = connection
        self._supervisor = supervisor
        self._streamed: set[str] = set()
        self._printed: dict[str, list[sandbox.ActionPrinted]] = {}
        self._one_off: dict[str, str] = {}
        self._opening: set[str] = set()
        self._snapshots: dict[str, int] = {}
        self._next_beat_s = self._next_trim_s = 0.0
        self._orders: deque[messages.ToWorker] = deque()
        self._finished_one_offs: deque[str] = deque()  # environments of ended one-off actions
        self._failed: dict[str, str] = {}

    def run(self) -> None:
        gc.freeze()  # objects of the start are no garbage, so later collections skip them
        self._supervisor.watch(self._connection.fileno())
        while self.step():
            pass

    def step(self) -> bool:
        """Handle the supervisor's reports and the control plane's messages; False to stop."""
        self._send_heartbeat()
        wait_s = max(self._next_beat_s - time.monotonic(), 0.0)
        is_idle = not self._orders and not self._finished_one_offs
        for report in self._supervisor.step(wait_s if is_idle else 0.0):
            self._report(report)
        while received := self._connection.receive(0.0):
            self._orders.extend(received)
        # One order at a time: each takes milliseconds, which delay the reports of other actions.
        message = self._orders.popleft() if self._orders else None
        if isinstance(message, messages.Stop):
            return False
        if message is not None:
            self._handle_message(message)
        if self._finished_one_offs and (
            message is None or len(self._finished_one_offs) > _MAX_FINISHED
        ):
            environment = self._finished_one_offs.popleft()
            if environment in self._supervisor.environments():
                self._supervisor.close_environment(environment)
        return True

    def _send_heartbeat(self) -> None:
        if time.monotonic() >= self._next_beat_s:
            gauges = {
                "running": float(len(self._supervisor.running())),
                "environments": float(len(self._supervisor.environments())),
                "quarantined": float(self._supervisor.quarantined),
                MEMORY_GAUGE: resident_bytes(),
            }
            self._send(messages.Heartbeat(gauges))
            self._next_beat_s = time.monotonic() + self._connection.heartbeat_every_s
        if time.monotonic() >= self._next_trim_s:
            gc.collect()
            trim_heap()
            self._next_trim_s = time.monotonic() + TRIM_EVERY_S

    def _send(self, *outgoing: messages.Message) -> None:
        self._connection.send(*(messages.encode(message) for message in outgoing))

    # ---- orders ----
    def _handle_message(self, message: messages.ToWorker) -> None:
        """Handle one message; a failure is that request's alone."""
        try:
            self._execute(message)
        except DisconnectedError:
            raise
        except Exception as error:
            if not isinstance(error, OSError | SlackwaterError):
                logger.exception("request failed message=%s", type(message).__name__)
            self._refuse(message, str(error) or type(error).__name__)

    def _execute(self, message: messages.ToWorker) -> None:
        match message:
            case sandbox.RunAction():
                self._start(message)
            case sandbox.StopAction(attempt, reason):
                self._supervisor.stop(str(attempt), reason)
            case sandbox.OpenEnvironment(environment):
                self._failed.pop(environment, None)
                note: dict[str, str | int] = {"job": message.job, "memory_mib": message.memory_mib}
                self._supervisor.open(environment, message.snapshot, message.files, note)
                self._opening.add(environment)
            case sandbox.CloseEnvironment(environment):
                self._opening.discard(environment)
                with contextlib.suppress(SlackwaterError):  # it may have failed to open
                    self._supervisor.close_environment(environment)
            case sandbox.KeepSnapshot(request, environment, name, most_bytes):
                self._supervisor.snapshot(environment, name, most_bytes)
                self._snapshots[name] = request
            case _:
                logger.warning("not for a sandbox: %s", type(message).__name__)

    def _refuse(self, message: messages.ToWorker, reason: str) -> None:
        """Answer a failed request, if its kind has an answer."""
        match message:
            case sandbox.RunAction(attempt):
                self._report(ActionEnded(str(attempt), End.NOT_STARTED, 127, Usage(), reason))
            case sandbox.OpenEnvironment(environment):
                self._send(sandbox.EnvironmentFailed(_truncate(environment), _truncate(reason)))
            case sandbox.KeepSnapshot(request):
                self._send(sandbox.SnapshotKept(request, _truncate(reason)))

    def _start(self, message: sandbox.RunAction) -> None:
        action = str(message.attempt)
        environment = message.environment
        if environment is None:
            environment = self._one_off[action] = f"{_ONE_OFF}{action}"
            self._supervisor.open(environment)
        elif environment in self._failed:
            raise RefusedError(self._failed[environment])
        order = Order(
            action=action,
            environment=environment,
            command=message.command,
            cores=frozenset(message.cores),
            limits=Limits(**msgspec.structs.asdict(message.limits)),
            variables=message.variables,
            stdin=message.stdin,
        )
        if message.stream:
            self._streamed.add(action)
        self._supervisor.start(order)

    # ---- reports ----
    def _report(self, report: Report) -> None:
        """Send output at once if streamed, otherwise with the action's end."""
        match report:
            case OutputPrinted(action, stream, data):
                printed = sandbox.ActionPrinted(int(action), stream, data)
                if action in self._streamed:
                    self._send(printed)
                else:
                    self._printed.setdefault(action, []).append(printed)
            case ActionEnded():
                self._report_end(report)
            case EnvironmentCreated(environment):
                if environment in self._opening:
                    self._opening.remove(environment)
                    self._send(sandbox.EnvironmentReady(environment))
            case EnvironmentCreationFailed(environment, reason):
                self._opening.discard(environment)
                self._failed[environment] = reason  # for actions that are already under way
                if len(self._failed) > _MAX_FAILURES:
                    del self._failed[next(iter(self._failed))]
                self._send(sandbox.EnvironmentFailed(environment, _truncate(reason)))
            case SnapshotEnded(name, error, size_bytes):
                if (request := self._snapshots.pop(name, None)) is not None:
                    why = None if error is None else _truncate(error)
                    self._send(sandbox.SnapshotKept(request, why, size_bytes))

    def _report_end(self, report: ActionEnded) -> None:
        action, usage = report.action, report.usage
        ended = sandbox.ActionFinished(
            attempt=int(action),
            end=report.end.value,
            status=report.status,
            reason=_truncate(report.reason),
            launch_s=usage.launch_s,
            run_s=usage.run_s,
            cpu_s=usage.cpu_s,
            max_rss_bytes=usage.max_rss_bytes,
        )
        self._streamed.discard(action)
        self._send(*self._printed.pop(action, []), ended)
        if (one_off := self._one_off.pop(action, None)) is not None:
            self._finished_one_offs.append(one_off)


def _truncate(text: str) -> str:
    """A reason that can be sent: short, and without the undecodable bytes of file names."""
    return text[:_MAX_REASON_CHARS].encode(errors="replace").decode()


def _describe(
    options: argparse.Namespace, choice: SandboxChoice, supervisor: SandboxSupervisor
) -> sandbox.SandboxFacts:
    environments = [
        sandbox.HeldEnvironment(name, str(note["job"]), int(note["memory_mib"]))
        for name, note in supervisor.adopt().items()
    ]
    share = parse_share(options.share)
    return sandbox.SandboxFacts(
        node=options.node,
        cores=cores_by_numa(options.cores, share),
        memory_mib=options.memory_mib or memory_mib(share),
        backend=choice.platform.backend.name,
        isolates=choice.platform.backend.isolates,
        said=list(choice.description),
        environments=environments,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A sandbox worker; a node's agent starts it.")
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="the control plane")
    parser.add_argument("--worker", required=True, help="this worker's name")
    parser.add_argument("--files", help="unused: a sandbox gets no files of the service")
    parser.add_argument("--relay", help="unused")
    parser.add_argument("--service", required=True, help="tells services of one machine apart")
    parser.add_argument(
        "--node", required=True, help="its name as a node, the same after a restart"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of environments; default: one per service"
    )
    parser.add_argument("--cores", default="", help="core numbers, such as 0-3,8; default: all")
    parser.add_argument("--share", default="0/1", help="which share of cores and memory: 0/2, 1/2")
    parser.add_argument("--memory-mib", type=int, default=0, help="for environments; default: most")
    parser.add_argument("--backend", default="auto", help="a name of `BackendName`")
    parser.add_argument("--image", default=DEFAULT_IMAGE, help="image of docker's containers")
    parser.add_argument("--allow", action="append", default=[], metavar="HOST:PORT")
    return parser.parse_args()


def main() -> None:
    options = _options()
    keep_mounts_private()
    name = f"{options.service}-{options.node}"
    folder = (options.folder or default_folder(options.service)).absolute() / options.node
    os.chdir(LAUNCHER_FOLDER)  # launchers start where no tenant can write
    choice = choose(name, folder, options.backend, options.image, allowed=options.allow)
    for line in choice.description:
        logger.info("%s", line)
    supervisor = SandboxSupervisor(folder / "environments", choice.platform)
    try:
        facts = _describe(options, choice, supervisor)
        hello = messages.Hello(options.worker, "sandbox", sandbox=facts)
        SandboxWorker(dial(options.connect, hello), supervisor).run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it already shuts down
        supervisor.close(keep=True)


if __name__ == "__main__":
    run_worker(main, cleans_up=True)
