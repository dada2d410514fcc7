"""The certificate that the control plane shows when workers and agents come from other machines."""

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from slackwater.model.errors import ConfigError

_VALID = datetime.timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key as files. Peers compare the certificate's SHA-256 (`pin`) with the one in their token."""

    certificate: Path
    key: Path

    @property
    def pin(self) -> str:
        """SHA-256 of the certificate."""
        try:
            found = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError.of("certificate", str(self.certificate), str(error)) from None
        return hashlib.sha256(found.public_bytes(serialization.Encoding.DER)).hexdigest()

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


def _make(new: Certificate) -> None:
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
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for path, data in (
        (new.key, secret),
        (new.certificate, signed.public_bytes(serialization.Encoding.PEM)),
    ):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
