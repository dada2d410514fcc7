"""Networks of environments: each has a loopback with a proxy on it, and nothing else.

The proxy process is outside, but its listening socket belongs to the network that the socket was
created in. So the machine's loopback, the control plane's ports and unlisted addresses stay
unreachable.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slackwater.model.endpoint import Endpoint
from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.sandbox import linux
from slackwater.sandbox.egress_proxy import EgressProxy
from slackwater.sandbox.launch import HelperProcess, receive_fds
from slackwater.sandbox.system_calls import filter_program

PROXY_PORT = 3128
_WITHIN_S = 20.0
_NOBODY = 65534
_ORDER = struct.Struct("<ci")
_SERVE, _REMOVE = b"s", b"f"


def proxy_variables() -> dict[str, str]:
    """Proxy variables in both cases, since programs differ in which they read."""
    url = f"http://127.0.0.1:{PROXY_PORT}"
    local = "localhost,127.0.0.1"
    variables = {"http_proxy": url, "https_proxy": url, "no_proxy": local}
    return variables | {name.upper(): value for name, value in variables.items()}


@dataclass(frozen=True, slots=True)
class _Network:
    number: int
    namespaces: dict[int, int]
    listener: int

    def close(self) -> None:
        for descriptor in (*self.namespaces.values(), self.listener):
            os.close(descriptor)


class Networks:
    """A supervisor's networks, created on first use; without `as_root` in own user namespaces."""

    def __init__(self, allowed: tuple[Endpoint, ...] = (), *, as_root: bool = False) -> None:
        self._allowed, self._as_root = allowed, as_root
        self._proxy: HelperProcess | None = None
        self._networks: dict[str, _Network] = {}
        self._next_number = 0

    def namespaces_for(self, environment: str) -> Mapping[int, int]:
        """The namespaces to join, by kind; RefusedError if the operator allows no address."""
        if not self._allowed:
            raise RefusedError(
                "limits.network: True is not granted here: the operator names the addresses that "
                "actions may reach with --sandbox-allow HOST:PORT (sandbox_allow in the "
                "configuration)"
            )
        self._ensure_proxy()
        if environment not in self._networks:
            self._next_number += 1
            network = _create_network(self._next_number, as_root=self._as_root)
            self._networks[environment] = network
            self._serve(network)
        return self._networks[environment].namespaces

    def _ensure_proxy(self) -> None:
        """Start the proxy for the networks that there are, unless it runs."""
        if self._proxy is None or self._proxy.has_ended:
            self._end_proxy()
            self._proxy = HelperProcess(
                lambda child_end: _run_proxy(child_end, self._allowed), _WITHIN_S
            )
            for network in self._networks.values():
                self._serve(network)

    def _serve(self, network: _Network) -> None:
        assert self._proxy is not None
        try:
            order = _ORDER.pack(_SERVE, network.number)
            socket.send_fds(self._proxy.socket, [order], [network.listener])
        except OSError as error:
            raise UnavailableError(f"the proxy of actions has ended: {error}") from None

    def remove(self, environment: str) -> None:
        network = self._networks.pop(environment, None)
        if network is not None:
            if self._proxy is not None:
                with contextlib.suppress(OSError):
                    self._proxy.socket.sendall(_ORDER.pack(_REMOVE, network.number))
            network.close()

    def close(self) -> None:
        for environment in list(self._networks):
            self.remove(environment)
        self._end_proxy()

    def _end_proxy(self) -> None:
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None


def _create_network(number: int, *, as_root: bool) -> _Network:
    """Create a network in a short-lived process, because its creator is moved into it."""
    kinds = (linux.CLONE_NEWNET,) if as_root else (linux.CLONE_NEWUSER, linux.CLONE_NEWNET)
    creator = HelperProcess(lambda child_end: _create_in_child(child_end, kinds), _WITHIN_S)
    try:
        reason, descriptors = receive_fds(creator.socket, 4096)
    except OSError as error:
        raise UnavailableError(f"a network cannot be created: {error}") from None
    finally:
        creator.close()
    if len(descriptors) != len(kinds) + 1:
        why = reason.decode(errors="replace") or "the process that creates it has ended"
        raise UnavailableError(f"a network cannot be created: {why}")
    return _Network(number, dict(zip(kinds, descriptors[1:], strict=True)), descriptors[0])


def _create_in_child(child_end: socket.socket, kinds: tuple[int, ...]) -> None:
    try:
        user, group = os.getuid(), os.getgid()
        linux.unshare(sum(kinds))
        if linux.CLONE_NEWUSER in kinds:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        linux.bring_loopback_up()
        listener = socket.create_server(("127.0.0.1", PROXY_PORT), backlog=64)
        descriptors = [linux.open_namespace(kind) for kind in kinds]
        socket.send_fds(child_end, [b"+"], [listener.fileno(), *descriptors])
    except OSError as error:
        child_end.sendall(str(error).encode()[:4000])


def _run_proxy(child_end: socket.socket, allowed: tuple[Endpoint, ...]) -> None:
    """The proxy process: unprivileged, with a thread for each network and each connection."""
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
        head, descriptors = receive_fds(child_end, _ORDER.size)
        if len(head) < _ORDER.size:
            return  # the supervisor has gone
        kind, number = _ORDER.unpack(head)
        if kind == _SERVE:
            listeners[number] = socket.socket(fileno=descriptors[0])
            listener = listeners[number]
            threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()
        elif number in listeners:
            # Hazard: without a shutdown, the thread in `accept` keeps the socket open.
            listeners[number].shutdown(socket.SHUT_RDWR)
            listeners.pop(number).close()
