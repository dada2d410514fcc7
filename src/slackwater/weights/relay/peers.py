"""Connections between relays of different nodes: encrypted, authenticated by certificates from the
control plane.

A relay serves exactly the payloads that the control plane offered to a node. The offer may arrive
after the node dials, so the node retries for a while.
"""

import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.wire.certificate import PeerIdentity, fingerprint_of, peer_fingerprint
from slackwater.wire.proof import STRANGER_S

_ADMITTED = b"\x01"
_RETRY_S = 0.1
_OFFERED_WITHIN_S = 5.0
_ADMISSION_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class RelayPeer:
    """Another node's relay, known by its certificate."""

    identity: PeerIdentity
    certificate: str

    def dial(
        self, address: tuple[str, int], timeout_s: float, is_cancelled: Callable[[], bool]
    ) -> ssl.SSLSocket:
        """Connect; UnavailableError if the relay has the wrong identity or refuses us."""
        deadline_s = time.monotonic() + _OFFERED_WITHIN_S
        while True:
            try:
                return self._dial(address, timeout_s)
            except ssl.SSLCertVerificationError as error:
                where = f"{address[0]}:{address[1]}"
                raise UnavailableError(f"relay {where} is not the one meant: {error}") from None
            except OSError as error:
                if is_cancelled() or time.monotonic() > deadline_s:
                    raise UnavailableError(f"relay {address[0]}:{address[1]}: {error}") from None
            time.sleep(_RETRY_S)

    def _dial(self, address: tuple[str, int], timeout_s: float) -> ssl.SSLSocket:
        plain = socket.create_connection(address, timeout=min(timeout_s, _ADMISSION_TIMEOUT_S))
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = self.identity.client_context(self.certificate).wrap_socket(plain)
        except BaseException:
            plain.close()
            raise
        try:
            if peer_fingerprint(connection) != fingerprint_of(self.certificate):
                raise UnavailableError("the relay shows another certificate than expected")
            if connection.recv(1) != _ADMITTED:
                raise ConnectionResetError("it does not admit this node")
        except BaseException:
            connection.close()
            raise
        return connection


class RelayOffers:
    """Which payloads a node's relay serves to which nodes."""

    def __init__(self, identity: PeerIdentity) -> None:
        self._identity = identity
        self._changed = threading.Condition()
        self._certificates: dict[str, str] = {}  # by fingerprint
        self._payloads: dict[str, set[Payload]] = {}

    def offer(self, payload: Payload, certificate: str) -> None:
        """Allow the holder of the certificate to fetch the payload."""
        found = fingerprint_of(certificate)
        with self._changed:
            self._certificates[found] = certificate
            self._payloads.setdefault(found, set()).add(payload)
            self._changed.notify_all()

    def withdraw(self, payload: Payload) -> None:
        """Withdraw a payload; a node without other offers is no longer admitted."""
        with self._changed:
            for found, payloads in list(self._payloads.items()):
                payloads.discard(payload)
                if not payloads:
                    del self._payloads[found], self._certificates[found]

    def admit(self, plain: socket.socket) -> tuple[ssl.SSLSocket, str]:
        """A TLS connection of a node that has an offer, and its certificate's fingerprint."""
        with self._changed:
            known = list(self._certificates.values())
        plain.settimeout(STRANGER_S)
        connection = self._identity.server_context(known).wrap_socket(plain, server_side=True)
        try:
            fingerprint = peer_fingerprint(connection)
            with self._changed:
                if fingerprint not in self._certificates:
                    raise UnavailableError("nothing is offered to this node any more")
            connection.sendall(_ADMITTED)
        except BaseException:
            with suppress(OSError):
                connection.close()
            raise
        return connection, fingerprint

    def check(self, peer: str, version: str, base: str | None) -> None:
        """RefusedError unless the payload (without `base`: any of the version) was offered."""
        deadline_s = time.monotonic() + _OFFERED_WITHIN_S
        with self._changed:
            while not self._is_offered(peer, version, base):
                if not self._changed.wait(max(deadline_s - time.monotonic(), 0.0)):
                    raise RefusedError(f"version: {version!r} was not offered to this node")

    def _is_offered(self, peer: str, version: str, base: str | None) -> bool:
        offered = self._payloads.get(peer, set())
        return any(c.version == version and base in (None, c.base) for c in offered)
