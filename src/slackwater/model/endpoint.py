"""Host and port, as an operator writes them."""

import re
from typing import NamedTuple

from slackwater.model.errors import ConfigError

_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]{0,251}[a-z0-9])?|\[[0-9a-f:.]{2,45}\]")


class Endpoint(NamedTuple):
    """`host` is in lower case, an IPv6 address without brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, field: str, text: str) -> "Endpoint":
        """`pypi.org:443`, `10.0.0.7:80` or `[fd00::1]:80`; an error names `field`."""
        host, _, port = text.rpartition(":")
        host = host.lower().removesuffix(".")
        is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
        if not is_port or _HOST.fullmatch(host) is None:
            raise ConfigError.of(field, text, "must be HOST:PORT, such as pypi.org:443")
        return cls(host.strip("[]"), int(port))
