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
    ActionBegan,
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
from slackwater.worker.process import dial, run_worker

_NODES = Path("/sys/devices/system/node")
_SHARE_FOR_ENVIRONMENTS = 0.8
logger = logging.getLogger(__name__)
_ONE_OFF = "once-"
_REASON_MOST = 4000
_FAILURES_MOST = 256
_USED_MOST = 16


def parse_cores(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        try:
            found.update(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            raise ConfigError.of(
                "--cores", text, "must be numbers and ranges, such as 0-3,8"
            ) from None
    return found


def parse_share(text: str) -> tuple[int, int]:
    """`1/2`: the second of two."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise ConfigError.of("--share", text, "must be NUMBER/COUNT, such as 0/2")
    return int(number), int(count)


def cores_by_numa(
    wanted: str, share: tuple[int, int] = (0, 1), nodes: Path = _NODES
) -> list[list[int]]:
    """This worker's share of the (wanted) cores, by NUMA node."""
    allowed = set(os.sched_getaffinity(0))
    if wanted:
        asked = parse_cores(wanted)
        if not asked <= allowed:
            raise ConfigError.of("--cores", wanted, f"must be of this machine's: {sorted(allowed)}")
        allowed = asked
    number, count = share
    allowed = set(sorted(allowed)[number::count])
    if not allowed:
        raise ConfigError.of("--share", f"{number}/{count}", "leaves this worker no core")
    found = []
    for folder in sorted(nodes.glob("node[0-9]*")):
        text = (folder / "cpulist").read_text().strip()
        if text and (cores := sorted(parse_cores(text) & allowed)):
            found.append(cores)
            allowed -= set(cores)
    return [*found, sorted(allowed)] if allowed else found


def memory_mib(share: tuple[int, int] = (0, 1)) -> int:
    """Most of the machine's memory; the rest is the system's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * _SHARE_FOR_ENVIRONMENTS) // share[1] >> 20


def folder_for_all(service: str) -> Path:
    """Default folder of environments, outside root's home, which other users cannot enter."""
    if os.getuid() == 0:
        return Path("/var/tmp") / f"slackwater-{service}"
    return Path(tempfile.gettempdir()) / f"slackwater-{os.getuid()}-{service}"


class SandboxWorker:
    """Between one connection and one supervisor."""

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
        self._used: deque[str] = deque()  # environments of one action that has ended
        self._failed: dict[str, str] = {}

    def run(self) -> None:
        """Run until stopped."""
        gc.freeze()  # what it starts with is no garbage, and need not be looked at again
        self._supervisor.watch(self._connection.fileno())
        while self.step():
            pass

    def step(self) -> bool:
        """Handle the supervisor's reports and the control plane's messages; False to stop."""
        self._beat()
        patience_s = max(self._next_beat_s - time.monotonic(), 0.0)
        waits = not self._orders and not self._used
        for report in self._supervisor.step(patience_s if waits else 0.0):
            self._tell(report)
        while came := self._connection.receive(0.0):
            self._orders.extend(came)
        # One at a time: each takes milliseconds, and what another tenant's action has ended with
        # would wait for all of them.
        message = self._orders.popleft() if self._orders else None
        if isinstance(message, messages.Stop):
            return False
        if message is not None:
            self._do(message)
        if self._used and (message is None or len(self._used) > _USED_MOST):
            self._close_used(self._used.popleft())
        return True

    def _close_used(self, environment: str) -> None:
        """Between orders: what another tenant's action waits for comes first."""
        if environment in self._supervisor.environments():
            self._supervisor.close_environment(environment)

    def _beat(self) -> None:
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

    def _send(self, *said: messages.Message) -> None:
        self._connection.send(*(messages.encode(message) for message in said))

    # ---- what it is told ----
    def _do(self, message: messages.ToWorker) -> None:
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
        """Answer a request that failed, if it is one that is answered."""
        match message:
            case sandbox.RunAction(attempt):
                self._tell(ActionEnded(str(attempt), End.NOT_STARTED, 127, Usage(), reason))
            case sandbox.OpenEnvironment(environment):
                self._send(sandbox.EnvironmentFailed(_sendable(environment), _sendable(reason)))
            case sandbox.KeepSnapshot(request):
                self._send(sandbox.SnapshotKept(request, _sendable(reason)))

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

    # ---- what it tells ----
    def _tell(self, report: Report) -> None:
        """Send output at once if streamed, otherwise with the action's end."""
        match report:
            case ActionBegan():
                return
            case OutputPrinted(action, stream, data):
                printed = sandbox.ActionPrinted(int(action), stream, data)
                if action in self._streamed:
                    self._send(printed)
                else:
                    self._printed.setdefault(action, []).append(printed)
            case ActionEnded():
                self._tell_end(report)
            case EnvironmentCreated(environment):
                if environment in self._opening:
                    self._opening.remove(environment)
                    self._send(sandbox.EnvironmentReady(environment))
            case EnvironmentCreationFailed(environment, reason):
                self._opening.discard(environment)
                self._failed[environment] = reason  # for actions that are on their way already
                if len(self._failed) > _FAILURES_MOST:
                    del self._failed[next(iter(self._failed))]
                self._send(sandbox.EnvironmentFailed(environment, _sendable(reason)))
            case SnapshotEnded(name, error, size_bytes):
                if (request := self._snapshots.pop(name, None)) is not None:
                    why = None if error is None else _sendable(error)
                    self._send(sandbox.SnapshotKept(request, why, size_bytes))

    def _tell_end(self, report: ActionEnded) -> None:
        action, usage = report.action, report.usage
        over = sandbox.ActionOver(
            attempt=int(action),
            end=report.end.value,
            status=report.status,
            reason=_sendable(report.reason),
            launch_s=usage.launch_s,
            run_s=usage.run_s,
            cpu_s=usage.cpu_s,
            max_rss_bytes=usage.max_rss_bytes,
        )
        self._streamed.discard(action)
        self._send(*self._printed.pop(action, []), over)
        if (one_off := self._one_off.pop(action, None)) is not None:
            self._used.append(one_off)


def _sendable(text: str) -> str:
    """A reason may name a file, and a file's name need not be text."""
    return text[:_REASON_MOST].encode(errors="replace").decode()


def _facts(
    options: argparse.Namespace, choice: SandboxChoice, supervisor: SandboxSupervisor
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
        backend=choice.platform.backend.name,
        isolates=choice.platform.backend.isolates,
        said=list(choice.description),
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
    parser.add_argument("--backend", default="auto", help="a name of `BackendName`")
    parser.add_argument("--image", default=DEFAULT_IMAGE, help="image of docker's containers")
    parser.add_argument("--allow", action="append", default=[], metavar="HOST:PORT")
    return parser.parse_args()


def main() -> None:
    options = _options()
    keep_mounts_private()
    name = f"{options.service}-{options.node}"
    folder = (options.folder or folder_for_all(options.service)).absolute() / options.node
    os.chdir(LAUNCHER_FOLDER)  # launchers start where no tenant can write
    choice = choose(name, folder, options.backend, options.image, allowed=options.allow)
    for line in choice.description:
        logger.info("%s", line)
    supervisor = SandboxSupervisor(folder / "environments", choice.platform)
    try:
        facts = _facts(options, choice, supervisor)
        hello = messages.Hello(options.worker, "sandbox", sandbox=facts)
        SandboxWorker(dial(options.connect, hello), supervisor).run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is leaving already
        supervisor.close(keep=True)


if __name__ == "__main__":
    run_worker(main, cleans_up=True)
