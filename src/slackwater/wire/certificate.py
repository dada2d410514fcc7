"""The certificate that the control plane shows when workers and agents come from other machines."""

import datetime
import hashlib
import os
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slackwater.model.errors import ConfigError

_LONGEST = 8192
_VALID = datetime.timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key as files; peers compare its SHA-256 (`pin`) with their token's."""

    certificate: Path
    key: Path

    @property
    def pin(self) -> str:
        """SHA-256 of the certificate."""
        try:
            return fingerprint_of(self.certificate.read_text())
        except (OSError, ConfigError) as error:
            raise ConfigError.of("certificate", str(self.certificate), str(error)) from None

    def context(self) -> ssl.SSLContext:
        """For a listening socket."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError.of("certificate", str(self.certificate), str(error)) from None
        return context

    @classmethod
    def kept_in(cls, folder: Path) -> "Certificate":
        """The folder's own certificate; it is made the first time."""
        made = cls(folder / "fleet.crt", folder / "fleet.key")
        if not (made.certificate.is_file() and made.key.is_file()):
            _make(made)
        return made


class PeerIdentity:
    """A certificate of this process, known to its peers; its key is on no disk if possible."""

    def __init__(self) -> None:
        self.certificate, key = _made()
        if hasattr(os, "memfd_create"):
            self._file: Any = os.fdopen(os.memfd_create("slackwater identity"), "wb", buffering=0)
            self._path = f"/proc/self/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="slackwater-", buffering=0)  # noqa: SIM115
            self._path = self._file.name
        self._file.write(self.certificate.encode() + key)

    def server_context(self, peers: Iterable[str]) -> ssl.SSLContext:
        """For connections from those who show one of these certificates, and from nobody else."""
        return self._context(ssl.PROTOCOL_TLS_SERVER, "".join(peers))

    def client_context(self, peer: str) -> ssl.SSLContext:
        """For connections to the one who shows this certificate, and to nobody else."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT, peer)

    def _context(self, protocol: int, trusted: str) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is compared, which says more
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._path)
        if trusted:
            context.load_verify_locations(cadata=trusted)
        return context


def fingerprint_of(certificate: str) -> str:
    """SHA-256 of one certificate in PEM; ConfigError if it is none that peers can be known by."""
    try:
        if len(certificate) > _LONGEST or certificate.count(ssl.PEM_HEADER) != 1:
            raise ValueError("must be one certificate")
        # Hazard: one that OpenSSL cannot read would keep a relay from admitting anybody.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificate)
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()
    except (ValueError, ssl.SSLError) as error:
        raise ConfigError.of("certificate", certificate[:40], f"cannot be: {error}") from None


def shown_by(connection: ssl.SSLSocket) -> str:
    """SHA-256 of the certificate that the other side has shown."""
    return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()


def _make(new: Certificate) -> None:
    certificate, key = _made()
    for path, data in ((new.key, key), (new.certificate, certificate.encode())):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)


def _made() -> tuple[str, bytes]:
    """A certificate and its key, as PEM."""
    from cryptography import x509  # only few processes make one
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
