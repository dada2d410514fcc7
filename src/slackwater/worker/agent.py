"""A node's agent: connects to the control plane, starts and stops workers, and reports on them.

    python -m slackwater.worker.agent --connect HOST:PORT --node NAME \\
        --files folder:DIRECTORY | URL=CACHE --logs FOLDER

The node's key comes in the environment, never on the command line. When the control plane is lost,
the agent keeps the workers that have a grace period and dials again: the control plane may adopt
them. After the grace period it ends them. With `--redial` it keeps dialling; without, it exits.
"""

import argparse
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

from slackwater.model.device import CPU, Device
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import NodeId
from slackwater.weights.relay.node_relay import FetchOutcome, NodeRelay
from slackwater.wire import agent as wire
from slackwater.wire import messages
from slackwater.worker.connection import Connection, DisconnectedError, RefusedByPlaneError
from slackwater.worker.node_devices import node_devices, parse_gpu_ids
from slackwater.worker.process import (
    NODE_SECRET_VARIABLE,
    address_of,
    leave_signal,
    pin,
    run_worker,
    secret,
)
from slackwater.worker.rank_group import RankGroup
from slackwater.worker.state_service import NodeStates, state_service
from slackwater.worker.template import WorkerTemplate

logger = logging.getLogger(__name__)

_BY_HAND = "--by-hand"
_LEAVE_S = 5.0
_TAIL_BYTES = 16 << 10
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.25, 10.0
_ADOPTABLE_PAUSE_S = 1.0
_SETTLED_S = 1.0  # after this time a connection counts as accepted
_RELAY_SHARE = 0.25


class NodeAgent:
    """The workers of one node, over all its connections."""

    def __init__(self, options: argparse.Namespace, node_secret: str, states: NodeStates) -> None:
        self._options, self._node_secret, self._states = options, node_secret, states
        self._address = address_of(options.connect)
        self.relay = _relay(options, self._address, node_secret, self._report_fetch)
        self._connection: Connection | None = None
        self._groups: dict[str, RankGroup] = {}
        self._unreported_ends: list[wire.WorkerEnded] = []  # while nobody was connected
        self.lost_s: float | None = None
        self._lock = threading.Lock()
        self.template = WorkerTemplate()

    def serve(self, state_place: wire.StatePlace | None, notice: "EvictionNotice") -> None:
        """Serve one connection until stopped; DisconnectedError if the control plane is lost."""
        with self._lock:
            self._unreported_ends.clear()
            running = tuple(
                wire.RunningWorker(group.order, group.pid) for group in self._groups.values()
            )
        facts = _facts(self._options, self.relay, state_place, running)
        hello = messages.Hello(wire.agent_name(self._options.node), "agent", node=facts)
        hung_up = threading.Event()
        with Connection(
            self._address, hello, secret(), pin=pin(), on_orphaned=hung_up.set
        ) as connection:
            connection.report_gauges(self._states.counts)
            with self._lock:
                self._connection = connection
                for ended in self._unreported_ends:
                    connection.send(messages.encode(ended))
            began_s = time.monotonic()
            try:
                with notice.report_over(connection.send):
                    self._run(connection)
            finally:
                self._connection, now_s = None, time.monotonic()
                if self.lost_s is None or now_s - began_s > _SETTLED_S:
                    self.lost_s = now_s

    def may_be_adopted(self) -> bool:
        """Whether some worker is still within its grace period."""
        running = self._groups.values()
        grace_s = max((group.order.grace_s for group in running), default=0.0)
        return self.lost_s is not None and time.monotonic() - self.lost_s < grace_s

    def _run(self, connection: Connection) -> None:
        while True:
            for message in connection.receive(None):
                match message:
                    case messages.Stop():
                        return
                    case wire.StartWorker():
                        self._start(message)
                    case wire.SignalWorker(worker, number):
                        self._signal(worker, number)
                    case wire.PrefetchStates(models, holding):
                        self._states.prefetch(models, holding)
                    case wire.ForgetStates(model):
                        self._states.forget(model)
                    case wire.SendState():
                        send = partial(self._send_state, message)
                        threading.Thread(target=send, daemon=True).start()
                    case wire.TakeState(model, key):
                        self._states.expected[key] = model
                    case wire.FetchPayload() | wire.OfferPayload() | wire.DropPayload():
                        self._handle_payload_message(message)
                    case _:
                        logger.warning("not for an agent: %s", type(message).__name__)

    def _handle_payload_message(
        self, message: wire.FetchPayload | wire.OfferPayload | wire.DropPayload
    ) -> None:
        if self.relay is None:
            return
        try:
            match message:
                case wire.FetchPayload(payload, source, address, certificate):
                    self.relay.fetch(payload, source, address_of(address), certificate)
                case wire.OfferPayload(payload, certificate):
                    self.relay.offer(payload, certificate)
                case wire.DropPayload(payload):
                    self.relay.drop(payload)
        except ConfigError as error:  # a wrong address of another node must not end this one
            logger.warning("%s", error)
            if isinstance(message, wire.FetchPayload):
                self._send(wire.PayloadFailed(message.payload, message.source, str(error)))

    def end_workers(self, *, include_adoptable: bool = True) -> None:
        """End all workers, or only those without a grace period: ask them to leave, then kill."""
        with self._lock:
            running = self._groups.values()
            groups = [group for group in running if include_adoptable or not group.order.grace_s]
        for group in groups:
            group.signal_all(leave_signal())
        processes = [process for group in groups for process in group.processes]
        deadline_s = time.monotonic() + _LEAVE_S
        for process in processes:
            try:
                process.wait(max(deadline_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        with self._lock:
            for group in groups:
                if self._groups.get(group.order.worker) is group:
                    del self._groups[group.order.worker]

    def _start(self, order: wire.StartWorker) -> None:
        options = self._options
        arguments = ["--connect", options.connect, "--worker", order.worker]
        arguments += ["--files", options.files]
        if self.relay is not None:
            host, port = self.relay.address
            arguments += ["--node", options.node, "--relay", f"{host}:{port}"]
        environment = {**os.environ, **self._states.environment, wire.PARENT: str(os.getpid())}
        environment |= {wire.SECRET: order.key, NODE_SECRET_VARIABLE: self._node_secret}
        if order.grace_s:
            environment[wire.GRACE] = f"{order.grace_s:g}"
        command = [sys.executable, "-m", order.module, *arguments, *order.arguments]
        try:
            logs = Path(options.logs)
            logs.mkdir(parents=True, exist_ok=True)
            group = RankGroup(order, command, environment, logs, self.template)
        except OSError as error:
            self._send(wire.WorkerNotStarted(order.worker, str(error)))
            return
        with self._lock:
            self._groups[order.worker] = group
        self._send(wire.WorkerStarted(order.worker, group.pid))
        threading.Thread(target=self._wait_for_end, args=(group,), daemon=True).start()

    def _wait_for_end(self, group: RankGroup) -> None:
        status, log, log_start = group.wait()
        last_line = last_log_line(log, log_start) if status > 0 else ""
        worker = group.order.worker
        ended = wire.WorkerEnded(worker, status, last_line)
        with self._lock:
            if self._groups.get(worker) is not group:
                return  # a newer worker has this name
            del self._groups[worker]
            if self._connection is None:  # the control plane may still list it as running
                self._unreported_ends.append(ended)
            else:
                self._send(ended)

    def _send_state(self, order: wire.SendState) -> None:
        error = self._states.send(order.model, order.to, order.key)
        self._send(wire.StateSent(order.move, order.model, error))

    def _report_fetch(self, outcome: FetchOutcome) -> None:
        if outcome.error:
            self._send(wire.PayloadFailed(outcome.payload, outcome.source, outcome.error))
        else:
            self._send(wire.PayloadArrived(outcome.payload))

    def _signal(self, worker: str, number: int) -> None:
        with self._lock:
            group = self._groups.get(worker)
        if number == signal.SIGTERM:
            number = leave_signal()
        if group is not None:
            group.signal_all(number)

    def _send(self, message: messages.Message) -> None:
        """Send a message, unless the control plane is lost."""
        if (connection := self._connection) is not None:
            with contextlib.suppress(DisconnectedError):
                connection.send(messages.encode(message))


class EvictionNotice:
    """Reports the first SIGTERM to the control plane, and ends the process `notice_s` later.

    Without a connection SIGTERM ends the process at once. Further ones during the notice do
    nothing, since a batch scheduler sends several.
    """

    def __init__(self, notice_s: float) -> None:
        self._notice_s = notice_s
        self._send: Callable[[bytes], None] | None = None
        self.is_given = False
        self._expired = False

    @property
    def status(self) -> int:
        """The agent's exit status; batch schedulers requeue what did not end with 0."""
        return os.EX_TEMPFAIL if self.is_given else 0

    @contextlib.contextmanager
    def report_over(self, send: Callable[[bytes], None]) -> Iterator[None]:
        self._send = send
        try:
            yield
        finally:
            self._send = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM."""
        if self.is_given and not self._expired:
            return
        if self._expired or self._send is None or not self._notice_s:
            sys.exit(self.status)
        self.is_given = True
        # The interrupted code may hold the connection's lock, so a thread sends.
        threading.Thread(target=self._report, args=(self._send,), daemon=True).start()

    def _report(self, send: Callable[[bytes], None]) -> None:
        logger.info("eviction notice received; turns move within %g s", self._notice_s)
        with contextlib.suppress(DisconnectedError):
            send(messages.encode(wire.NodeLeaving(self._notice_s)))
        time.sleep(self._notice_s)
        self._expired = True
        os.kill(os.getpid(), signal.SIGTERM)


def last_log_line(log: Path, offset: int) -> str:
    """The last line of a log after an offset, without logging's time and name."""
    try:
        with log.open("rb") as file:
            file.seek(max(offset, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    _, error, message = last.partition(" ERROR ")
    return message.partition(" ")[2] if error else last


def _relay(
    options: argparse.Namespace,
    hub: tuple[str, int],
    node_secret: str,
    tell: Callable[[FetchOutcome], None],
) -> NodeRelay | None:
    """The node's weight relay; None if its memory limit is 0."""
    max_bytes = int(options.weights_gb * (1 << 30))
    if options.weights_gb < 0:
        max_bytes = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _RELAY_SHARE)
    if not max_bytes:
        return None
    return NodeRelay(node_secret.encode(), options.node, _own_host(hub), max_bytes, tell=tell)


def _own_host(hub: tuple[str, int]) -> str:
    """This machine's address in the control plane's network."""
    family, kind, *_, address = socket.getaddrinfo(*hub, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        host: str = probe.getsockname()[0]
        return host


def _facts(
    options: argparse.Namespace,
    relay: NodeRelay | None,
    states: wire.StatePlace | None,
    running: tuple[wire.RunningWorker, ...],
) -> wire.NodeFacts:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return wire.NodeFacts(
        node=options.node,
        pool=options.pool,
        cores=len(os.sched_getaffinity(0)),
        memory_mb=pages * page_bytes >> 20,
        host=socket.gethostname(),
        pid=os.getpid(),
        relay="" if relay is None else "{}:{}".format(*relay.peer_address),
        certificate="" if relay is None else relay.certificate,
        site=options.site,
        states=states,
        devices=_devices(options),
        running=running,
    )


def _devices(options: argparse.Namespace) -> tuple[Device, ...]:
    gpu_ids = None if options.gpu_ids is None else parse_gpu_ids(options.gpu_ids)
    return node_devices(
        NodeId(options.node),
        slices=options.devices,
        gpu_ids=gpu_ids,
        probe=options.device != CPU,
        share_gpu=options.share_gpu,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A node's agent; `slackwater agent` starts it.")
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="the control plane")
    parser.add_argument("--node", required=True, help="this node's name in the fleet")
    parser.add_argument("--pool", help="the pool of the fleet file that the node belongs to")
    parser.add_argument("--files", required=True, help="folder:DIRECTORY, or URL=CACHE of a depot")
    parser.add_argument("--logs", required=True, help="folder for the workers' output")
    parser.add_argument("--site", default="", help="name of the fast network that the node is on")
    parser.add_argument(
        "--weights-gb",
        type=float,
        default=-1.0,
        help="most memory of the weight relay; 0: none; below 0: a quarter of the node's",
    )
    parser.add_argument("--device", default="", help="cpu: do not look for GPUs")
    parser.add_argument("--cores", help="the node's cores, such as 0,1; default: all")
    parser.add_argument("--devices", type=int, default=1, help="slices of the node's cores")
    parser.add_argument("--gpu-ids", help="the GPUs that the node lends, such as 0,1; default: all")
    parser.add_argument(
        "--share-gpu", action="store_true", help="other nodes may report the machine's only GPU"
    )
    parser.add_argument(
        "--notice-s", type=float, default=0.0, help="time to leave after SIGTERM, to move turns"
    )
    parser.add_argument(
        "--redial", action="store_true", help="reconnect after the control plane was lost"
    )
    parser.add_argument(_BY_HAND, action="store_true", help="outlive whoever started it")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, map(int, options.cores.split(",")))
    notice = EvictionNotice(options.notice_s)
    signal.signal(signal.SIGTERM, notice.receive)
    if options.notice_s:
        os.environ[wire.NOTICED] = "1"
    # Spinning OpenMP threads of several workers take cores from each other: on a busy machine a
    # pass took ten times the CPU time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = "1"
    # The states outlive the connection to the control plane, and every worker.
    node_secret = secrets.token_urlsafe(32)
    with state_service(Path(options.logs), node_secret) as states:
        serve_until_stopped(options, states, node_secret, notice)
    sys.exit(notice.status)


def serve_until_stopped(
    options: argparse.Namespace, states: NodeStates, node_secret: str, notice: EvictionNotice
) -> None:
    """Serve connections until stopped; reconnect with `--redial` or to have workers adopted."""
    address = address_of(options.connect)
    with contextlib.ExitStack() as stack:
        agent = NodeAgent(options, node_secret, states)
        if agent.relay is not None:
            stack.callback(agent.relay.close)
        receiving = states.receiving(partial(_own_host, address), encrypted=pin() is not None)
        state_place = stack.enter_context(receiving)
        stack.callback(agent.template.close)
        stack.callback(agent.end_workers)
        pause_s, lost_s = _MIN_PAUSE_S, agent.lost_s
        while True:
            try:
                agent.serve(state_place, notice)
                return
            except (DisconnectedError, UnavailableError) as error:
                final = isinstance(error, RefusedByPlaneError) and not error.again
                if notice.is_given:
                    return
                if agent.lost_s != lost_s:
                    pause_s, lost_s = _MIN_PAUSE_S, agent.lost_s
                adoptable = not final and agent.may_be_adopted()
                if not adoptable and (final or not options.redial):
                    raise
                agent.end_workers(include_adoptable=not adoptable)
                if agent.relay is not None:
                    agent.relay.drop_all()  # another control plane does not know its payloads
                logger.warning("%s; trying again in %.1f s", error, pause_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _ADOPTABLE_PAUSE_S if adoptable else _MAX_PAUSE_S)


if __name__ == "__main__":
    run_worker(main, by_hand=_BY_HAND in sys.argv)
