"""Networks of environments: a loopback and a proxy on it, nothing else.

The proxy process outside holds the listening socket, which belongs to the network that it was made
in. So the machine's loopback, the control plane's ports and unlisted addresses stay unreachable.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slackwater.model.endpoint import Endpoint
from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.egress_proxy import EgressProxy
from slackwater.sandbox.launch import fork_helper, receive_with_descriptors
from slackwater.sandbox.system_calls import filter_program

PROXY_PORT = 3128
_WITHIN_S = 20.0
_NOBODY = 65534
_ORDER = struct.Struct("<ci")
_SERVE, _FORGET = b"s", b"f"


def proxy_variables() -> dict[str, str]:
    """Proxy variables in both cases, since programs differ in which they read."""
    url = f"http://127.0.0.1:{PROXY_PORT}"
    near = "localhost,127.0.0.1"
    told = {"http_proxy": url, "https_proxy": url, "no_proxy": near}
    return told | {name.upper(): value for name, value in told.items()}


@dataclass(frozen=True, slots=True)
class _Network:
    number: int
    namespaces: dict[int, int]
    listener: int

    def close(self) -> None:
        for descriptor in (*self.namespaces.values(), self.listener):
            os.close(descriptor)


class Networks:
    """A supervisor's networks, made on first use; `as_root`, or each in its own user namespace."""

    def __init__(self, allowed: tuple[Endpoint, ...] = (), *, as_root: bool = False) -> None:
        self._allowed, self._as_root = allowed, as_root
        self._proxy = _ProxyProcess(allowed)
        self._made: dict[str, _Network] = {}
        self._count = 0

    def of(self, environment: str) -> Mapping[int, int]:
        """The namespaces to enter, by kind; RefusedError if the operator allows no address."""
        if not self._allowed:
            raise RefusedError(
                "limits.network: True is not granted here: the operator names the addresses that "
                "actions may reach with --sandbox-allow HOST:PORT (sandbox_allow in the "
                "configuration)"
            )
        self._proxy.ensure(self._made.values())
        if environment not in self._made:
            self._count += 1
            made = _make(self._count, as_root=self._as_root)
            self._made[environment] = made
            self._proxy.serve(made)
        return self._made[environment].namespaces

    def forget(self, environment: str) -> None:
        found = self._made.pop(environment, None)
        if found is not None:
            self._proxy.forget(found.number)
            found.close()

    def close(self) -> None:
        for environment in list(self._made):
            self.forget(environment)
        self._proxy.close()


def _make(number: int, *, as_root: bool) -> _Network:
    """Make a network in a short-lived process, since its maker is inside it."""
    kinds = (linux.CLONE_NEWNET,) if as_root else (linux.CLONE_NEWUSER, linux.CLONE_NEWNET)
    pid, ours = fork_helper(lambda theirs: _make_here(theirs, kinds), _WITHIN_S)
    try:
        said, descriptors = receive_with_descriptors(ours, 4096)
    except OSError as error:
        raise UnavailableError(f"no network can be made: {error}") from None
    finally:
        ours.close()
        process_tree.kill_and_reap(pid)
    if len(descriptors) != len(kinds) + 1:
        why = said.decode(errors="replace") or "who makes it has gone"
        raise UnavailableError(f"no network can be made: {why}")
    return _Network(number, dict(zip(kinds, descriptors[1:], strict=True)), descriptors[0])


def _make_here(theirs: socket.socket, kinds: tuple[int, ...]) -> None:
    try:
        user, group = os.getuid(), os.getgid()
        linux.unshare(sum(kinds))
        if linux.CLONE_NEWUSER in kinds:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        linux.bring_loopback_up()
        listener = socket.create_server(("127.0.0.1", PROXY_PORT), backlog=64)
        opened = [linux.open_namespace(kind) for kind in kinds]
        socket.send_fds(theirs, [b"+"], [listener.fileno(), *opened])
    except OSError as error:
        theirs.sendall(str(error).encode()[:4000])


class _ProxyProcess:
    """The supervisor's end; starts the process on first use or after its death."""

    def __init__(self, allowed: tuple[Endpoint, ...]) -> None:
        self._allowed = allowed
        self._pid = self._pidfd = -1
        self._socket: socket.socket | None = None

    def ensure(self, networks: Iterable[_Network]) -> None:
        """Have it run, with these."""
        if self._socket is not None and not select.select([self._pidfd], [], [], 0)[0]:
            return
        self.close()
        self._pid, self._socket = fork_helper(
            lambda theirs: _live(theirs, self._allowed), _WITHIN_S
        )
        self._pidfd = os.pidfd_open(self._pid)
        process_tree.helpers.add(self._pid)
        for network in networks:
            self.serve(network)

    def serve(self, network: _Network) -> None:
        assert self._socket is not None
        try:
            order = _ORDER.pack(_SERVE, network.number)
            socket.send_fds(self._socket, [order], [network.listener])
        except OSError as error:
            raise UnavailableError(f"the proxy of actions has gone: {error}") from None

    def forget(self, number: int) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(_ORDER.pack(_FORGET, number))

    def close(self) -> None:
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        process_tree.helpers.discard(self._pid)


def _live(theirs: socket.socket, allowed: tuple[Endpoint, ...]) -> None:
    """The proxy's process: without root's rights, a thread for each network and each connection."""
    if os.getuid() == 0:
        linux.drop_capabilities()
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    linux.gain_no_privileges()
    linux.filter_calls(filter_program())
    os.chdir("/")
    proxy = EgressProxy(allowed)
    listeners: dict[int, socket.socket] = {}
    while True:
        head, descriptors = receive_with_descriptors(theirs, _ORDER.size)
        if len(head) < _ORDER.size:
            return  # the supervisor has gone
        kind, number = _ORDER.unpack(head)
        if kind == _SERVE:
            listeners[number] = socket.socket(fileno=descriptors[0])
            served = listeners[number]
            threading.Thread(target=proxy.serve, args=(served,), daemon=True).start()
        elif number in listeners:
            # Or the thread that waits there keeps the socket open.
            listeners[number].shutdown(socket.SHUT_RDWR)
            listeners.pop(number).close()
