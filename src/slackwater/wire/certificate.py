"""TLS certificates of the control plane and of relays, verified by their SHA-256."""

import datetime
import hashlib
import os
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from slackwater.model.errors import ConfigError
from slackwater.model.folder import write_whole

_LONGEST = 8192
_PEERS = 64  # whose contexts are kept: making one takes 2 ms
_VALID = datetime.timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key as files; peers compare its SHA-256 (`pin`) with their token."""

    certificate: Path
    key: Path

    @property
    def pin(self) -> str:
        try:
            return fingerprint_of(self.certificate.read_text())
        except (OSError, ConfigError) as error:
            raise ConfigError.of("certificate", str(self.certificate), str(error)) from None

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError.of("certificate", str(self.certificate), str(error)) from None
        return context

    @classmethod
    def load_or_create(cls, folder: Path) -> "Certificate":
        """The folder's certificate, which is created the first time."""
        made = cls(folder / "fleet.crt", folder / "fleet.key")
        if not (made.certificate.is_file() and made.key.is_file()):
            certificate, key = _generate()
            write_whole(made.key, key.decode())
            write_whole(made.certificate, certificate)
        return made


class PeerIdentity:
    """A certificate of this process, known to its peers; its key is not on disk if possible."""

    def __init__(self) -> None:
        self.certificate, key = _generate()
        if hasattr(os, "memfd_create"):
            self._file: Any = os.fdopen(os.memfd_create("slackwater identity"), "wb", buffering=0)
            self._path = f"/proc/self/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="slackwater-", buffering=0)  # noqa: SIM115
            self._path = self._file.name
        self._file.write(self.certificate.encode() + key)

    def server_context(self, peers: Iterable[str]) -> ssl.SSLContext:
        """The context for connections from peers with one of these certificates only."""
        return self._context(ssl.PROTOCOL_TLS_SERVER, "".join(peers))

    def client_context(self, peer: str) -> ssl.SSLContext:
        """The context for connections to the peer with this certificate only."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT, peer)

    @lru_cache(_PEERS)  # noqa: B019  (one identity lives as long as its process)
    def _context(self, protocol: int, trusted: str) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is compared, which is stricter
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._path)
        if trusted:
            context.load_verify_locations(cadata=trusted)
        return context


def fingerprint_of(certificate: str) -> str:
    """SHA-256 of one certificate in PEM; ConfigError if it cannot identify a peer."""
    try:
        if len(certificate) > _LONGEST or certificate.count(ssl.PEM_HEADER) != 1:
            raise ValueError("must be one certificate")
        # Hazard: a certificate that OpenSSL cannot read would keep a relay from admitting any peer.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificate)
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()
    except (ValueError, ssl.SSLError) as error:
        raise ConfigError.of("certificate", certificate[:40], f"cannot be: {error}") from None


def peer_fingerprint(connection: ssl.SSLSocket) -> str:
    return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()


def _generate() -> tuple[str, bytes]:
    """A certificate and its key, as PEM."""
    from cryptography import x509  # imported here: few processes create a certificate
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "slackwater fleet")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(days=1),
        not_valid_after=now + _VALID,
    )
    signed = builder.sign(key, hashes.SHA256())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return signed.public_bytes(serialization.Encoding.PEM).decode(), secret
