"""A node's agent: connects to the control plane, starts and stops workers, and reports on them.

    python -m slackwater.worker.agent --connect HOST:PORT --node NAME \\
        --files folder:DIRECTORY | URL=CACHE --logs FOLDER

The node's key comes in the environment, never on the command line. When the control plane is lost,
the agent keeps the workers that have a grace period, and dials again: the control plane may adopt
them. Once that is over it ends them. With `--redial` it goes on dialling; without, it exits.
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
from slackwater.model.payload import Payload
from slackwater.weights.relay.node_relay import FetchOutcome, NodeRelay
from slackwater.wire import agent as says
from slackwater.wire import messages
from slackwater.worker.connection import Connection, DisconnectedError, RefusedByPlaneError
from slackwater.worker.node_devices import node_devices, parse_gpu_ids
from slackwater.worker.process import (
    NODE_SECRET_VARIABLE,
    SECRET_VARIABLE,
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
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_ADOPTABLE_PAUSE_S = 1.0
_SETTLED_S = 1.0  # a connection that lasted so long was not refused
_RELAY_SHARE = 0.25


class NodeAgent:
    """The workers of one node, over all its connections."""

    def __init__(
        self,
        options: argparse.Namespace,
        node_secret: str,
        states: NodeStates,
        relay: NodeRelay | None,
    ) -> None:
        self._options, self._node_secret = options, node_secret
        self._states, self._relay = states, relay
        self._address = address_of(options.connect)
        self._connection: Connection | None = None
        self._groups: dict[str, RankGroup] = {}
        self._ended: list[says.WorkerEnded] = []  # while nobody was connected
        self.lost_s: float | None = None
        self._lock = threading.Lock()
        self.template = WorkerTemplate()
        if relay is not None:
            relay.tell = self._report_fetch

    def serve(self, place: says.StatePlace | None, notice: "EvictionNotice") -> None:
        """One connection, until told to stop; DisconnectedError if the control plane is lost."""
        with self._lock:
            self._ended.clear()
            running = tuple(
                says.RunningWorker(group.order, group.pid) for group in self._groups.values()
            )
        facts = _facts(self._options, self._relay, place, running)
        hello = messages.Hello(f"agent:{self._options.node}", "agent", node=facts)
        hung_up = threading.Event()
        with Connection(
            self._address, hello, secret(), pin=pin(), orphaned=hung_up.set
        ) as connection:
            connection.report_gauges(self._states.counts)
            with self._lock:
                self._connection = connection
                for ended in self._ended:
                    connection.send(messages.encode(ended))
            began_s = time.monotonic()
            try:
                with notice.reported_by(connection.send):
                    self._run(connection)
            finally:
                self._connection, now_s = None, time.monotonic()
                if self.lost_s is None or now_s - began_s > _SETTLED_S:
                    self.lost_s = now_s

    def may_be_adopted(self) -> bool:
        """Whether the control plane was lost only just now, for a worker that waits for it."""
        running = self._groups.values()
        grace_s = max((group.order.grace_s for group in running), default=0.0)
        return self.lost_s is not None and time.monotonic() - self.lost_s < grace_s

    def _run(self, connection: Connection) -> None:
        while True:
            for message in connection.receive(None):
                match message:
                    case messages.Stop():
                        return
                    case says.StartWorker():
                        self._start(message)
                    case says.SignalWorker(worker, number):
                        self._signal(worker, number)
                    case says.PrefetchStates() | says.SendState() | says.ForgetStates():
                        self._about_states(message)
                    case says.TakeState(model, key):
                        self._states.expected[key] = model
                    case says.FetchPayload() | says.OfferPayload() | says.DropPayload():
                        self._about_payloads(message)
                    case _:
                        logger.warning("not for an agent: %s", type(message).__name__)

    def _about_payloads(
        self, message: says.FetchPayload | says.OfferPayload | says.DropPayload
    ) -> None:
        if self._relay is None:
            return
        payload = Payload(message.version, message.base)
        try:
            match message:
                case says.FetchPayload(source=source, address=address, certificate=certificate):
                    self._relay.bring(payload, source, address_of(address), certificate)
                case says.OfferPayload(certificate=certificate):
                    self._relay.offer(payload, certificate)
                case says.DropPayload():
                    self._relay.drop(payload)
        except ConfigError as error:  # what another node says of itself must not end this one
            logger.warning("%s", error)
            if isinstance(message, says.FetchPayload):
                broke = (message.version, message.base, message.source, str(error))
                self._tell(says.PayloadFailed(*broke))

    def end_workers(self, *, all_of_them: bool = True) -> None:
        """Ask every worker to leave, or those that no control plane may adopt; then make them."""
        with self._lock:
            running = self._groups.values()
            groups = [group for group in running if all_of_them or not group.order.grace_s]
        for group in groups:
            group.signal_all(leave_signal())
        left = [process for group in groups for process in group.processes]
        deadline_s = time.monotonic() + _LEAVE_S
        for process in left:
            try:
                process.wait(max(deadline_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        with self._lock:
            for group in groups:
                if self._groups.get(group.order.worker) is group:
                    del self._groups[group.order.worker]

    def _start(self, order: says.StartWorker) -> None:
        options = self._options
        arguments = ["--connect", options.connect, "--worker", order.worker]
        arguments += ["--files", options.files]
        if self._relay is not None:
            host, port = self._relay.address
            arguments += ["--node", options.node, "--relay", f"{host}:{port}"]
        environment = {**os.environ, **self._states.environment, says.PARENT: str(os.getpid())}
        environment |= {SECRET_VARIABLE: order.key, NODE_SECRET_VARIABLE: self._node_secret}
        if order.grace_s:
            environment[says.GRACE] = f"{order.grace_s:g}"
        command = [sys.executable, "-m", order.module, *arguments, *order.arguments]
        try:
            logs = Path(options.logs)
            logs.mkdir(parents=True, exist_ok=True)
            group = RankGroup(order, command, environment, logs, self.template)
        except OSError as error:
            self._tell(says.WorkerNotStarted(order.worker, str(error)))
            return
        with self._lock:
            self._groups[order.worker] = group
        self._tell(says.WorkerStarted(order.worker, group.pid))
        threading.Thread(target=self._wait, args=(group,), daemon=True).start()

    def _wait(self, group: RankGroup) -> None:
        status, log, began = group.wait()
        said = last_words(log, began) if status > 0 else ""
        worker = group.order.worker
        ended = says.WorkerEnded(worker, status, said)
        with self._lock:
            if self._groups.get(worker) is not group:
                return  # another has its name by now
            del self._groups[worker]
            if self._connection is None:  # maybe it has just been reported as running
                self._ended.append(ended)
            else:
                self._tell(ended)

    def _about_states(
        self, message: says.PrefetchStates | says.SendState | says.ForgetStates
    ) -> None:
        match message:
            case says.PrefetchStates(models, holding):
                self._states.prefetch(models, holding)
            case says.ForgetStates(model):
                self._states.forget(model)
            case says.SendState():
                sending = threading.Thread(target=self._send_state, args=(message,), daemon=True)
                sending.start()

    def _send_state(self, order: says.SendState) -> None:
        error = self._states.send(order.model, order.to, order.key)
        self._tell(says.StateSent(order.move, order.model, error))

    def _report_fetch(self, brought: FetchOutcome) -> None:
        """How a fetch ended."""
        payload = brought.payload
        said: messages.Message = says.PayloadArrived(payload.version, payload.base)
        if brought.error:
            said = says.PayloadFailed(payload.version, payload.base, brought.source, brought.error)
        self._tell(said)

    def _signal(self, worker: str, number: int) -> None:
        with self._lock:
            group = self._groups.get(worker)
        if number == signal.SIGTERM:
            number = leave_signal()
        if group is not None:
            group.signal_all(number)

    def _tell(self, message: messages.Message) -> None:
        """Unless the control plane is lost."""
        if (connection := self._connection) is not None:
            with contextlib.suppress(DisconnectedError):
                connection.send(messages.encode(message))


class EvictionNotice:
    """Reports the first SIGTERM to the control plane, and ends the process `notice_s` later.

    SIGTERM ends it at once while nobody is connected. Further ones during the notice do nothing: a
    batch scheduler sends several.
    """

    def __init__(self, notice_s: float) -> None:
        self._notice_s = notice_s
        self._send: Callable[[bytes], None] | None = None
        self.given = False
        self._over = False

    @property
    def status(self) -> int:
        """The agent's exit status; schedulers start again what has not ended with 0."""
        return os.EX_TEMPFAIL if self.given else 0

    @contextlib.contextmanager
    def reported_by(self, send: Callable[[bytes], None]) -> Iterator[None]:
        """Report it over this connection."""
        self._send = send
        try:
            yield
        finally:
            self._send = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM."""
        if self.given and not self._over:
            return
        if self._over or self._send is None or not self._notice_s:
            sys.exit(self.status)
        self.given = True
        # The interrupted code may hold the connection's lock, so a thread sends.
        threading.Thread(target=self._report, args=(self._send,), daemon=True).start()

    def _report(self, send: Callable[[bytes], None]) -> None:
        logger.info("told to leave; turns move within %g s", self._notice_s)
        with contextlib.suppress(DisconnectedError):
            send(messages.encode(says.NodeLeaving(self._notice_s)))
        time.sleep(self._notice_s)
        self._over = True
        os.kill(os.getpid(), signal.SIGTERM)


def last_words(log: Path, after: int) -> str:
    """The last line of a log after an offset, without logging's time and name."""
    try:
        with log.open("rb") as file:
            file.seek(max(after, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    _, error, message = last.partition(" ERROR ")
    return message.partition(" ")[2] if error else last


def _relay(options: argparse.Namespace, hub: tuple[str, int], node_secret: str) -> NodeRelay | None:
    """The node's weight relay; None if it may have no memory."""
    max_bytes = int(options.weights_gb * (1 << 30))
    if options.weights_gb < 0:
        max_bytes = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _RELAY_SHARE)
    if not max_bytes:
        return None
    return NodeRelay(node_secret.encode(), options.node, _own_host(hub), max_bytes)


def _own_host(hub: tuple[str, int]) -> str:
    """The address by which the control plane's network reaches this machine."""
    family, kind, *_, address = socket.getaddrinfo(*hub, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        host: str = probe.getsockname()[0]
        return host


def _facts(
    options: argparse.Namespace,
    relay: NodeRelay | None,
    states: says.StatePlace | None,
    running: tuple[says.RunningWorker, ...],
) -> says.NodeFacts:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return says.NodeFacts(
        node=options.node,
        pool=options.pool,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
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
        look=options.device != CPU,
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
    parser.add_argument("--redial", action="store_true", help="try again when the plane has gone")
    parser.add_argument(_BY_HAND, action="store_true", help="outlive whoever started it")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, map(int, options.cores.split(",")))
    notice = EvictionNotice(options.notice_s)
    signal.signal(signal.SIGTERM, notice.receive)
    if options.notice_s:
        os.environ[says.NOTICED] = "1"
    # Threads of workers that wait by spinning take the cores from each other: on a busy machine a
    # pass took ten times the CPU time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = "1"
    # The states outlive the connection to the control plane, and every worker.
    node_secret = secrets.token_urlsafe(32)
    with state_service(Path(options.logs), node_secret) as states:
        serve_until_told(options, states, node_secret, notice)
    sys.exit(notice.status)


def serve_until_told(
    options: argparse.Namespace, states: NodeStates, node_secret: str, notice: EvictionNotice
) -> None:
    """Serve connections until told to leave; while workers may be adopted, or with `--redial`,
    reconnect.
    """
    address = address_of(options.connect)
    with contextlib.ExitStack() as open_here:
        relay = _relay(options, address, node_secret)
        if relay is not None:
            open_here.callback(relay.close)
        taking = states.taking(partial(_own_host, address), encrypted=pin() is not None)
        place = open_here.enter_context(taking)
        agent = NodeAgent(options, node_secret, states, relay)
        open_here.callback(agent.template.close)
        open_here.callback(agent.end_workers)
        pause_s, lost_s = _SHORTEST_PAUSE_S, agent.lost_s
        while True:
            try:
                agent.serve(place, notice)
                return
            except (DisconnectedError, UnavailableError) as error:
                final = isinstance(error, RefusedByPlaneError) and not error.again
                if notice.given:
                    return
                if agent.lost_s != lost_s:
                    pause_s, lost_s = _SHORTEST_PAUSE_S, agent.lost_s
                adoptable = not final and agent.may_be_adopted()
                if not adoptable and (final or not options.redial):
                    raise
                agent.end_workers(all_of_them=not adoptable)
                if relay is not None:
                    relay.drop_all()  # of which no other control plane knows
                logger.warning("%s; trying again in %.1f s", error, pause_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _ADOPTABLE_PAUSE_S if adoptable else _LONGEST_PAUSE_S)


if __name__ == "__main__":
    run_worker(main, by_hand=_BY_HAND in sys.argv)
