"""Host and Origin checks: a web page must not reach the service through a user's browser.

A page can resolve its own name to this machine (DNS rebinding) and so call the service from the
user's browser, behind the firewall. The browser always sends the called host (`Host`) and the
calling page (`Origin`).
"""

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.serve.http.errors import send_refusal

ANY = "*"
_WILDCARDS = frozenset({"", "0.0.0.0", "::"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class HostCheck:
    """ASGI middleware: 421 for a foreign Host, 403 for a change from a foreign Origin.

    `bound` is the listening address, `allowed` further names, with or without a port. If bound to
    all addresses, any literal IP is accepted: a rebound page still calls by name.
    """

    def __init__(self, app: ASGIApp, *, bound: str, allowed: Iterable[str] = ()) -> None:
        self._app = app
        self._allowed = frozenset(name.lower().rstrip(".") for name in allowed)
        self._bound = bound.lower()
        self._is_bound_to_all = self._bound in _WILDCARDS
        self._own = {"localhost", self._bound} - _WILDCARDS
        if self._is_bound_to_all:
            self._own.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
            return
        await send_refusal(scope, send, *refused)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1:
            return 400, "host: sent more than once; send it once"
        host = hosts[0].decode("latin-1").strip().lower() if hosts else ""
        # Browsers always send Host; HTTP/1.0 health probes do not.
        if host and not self._is_own(host):
            fix = "is no name of this service; start it with --allowed-host NAME"
            return 421, f"host: {host[:200]!r} {fix}"
        if scope["method"] in _SAFE_METHODS:
            return None
        for name, value in scope["headers"]:
            if name == b"origin" and not self._is_same(value.decode("latin-1").lower(), host):
                fix = "is a different site; its pages may not call this service"
                return 403, f"origin: {value.decode('latin-1')[:200]!r} {fix}"
        return None

    def _is_own(self, host: str) -> bool:
        name = _name(host)
        if name is None:
            return False
        if ANY in self._allowed or name in self._own or self._is_listed(host, name):
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return self._is_bound_to_all or address.is_loopback or address.is_unspecified

    def _is_same(self, origin: str, host: str) -> bool:
        """Schemes may differ if a proxy terminates TLS."""
        site = origin.partition("://")[2]
        name = _name(site)
        return name is not None and (site == host or self._is_listed(site, name))

    def _is_listed(self, host: str, name: str) -> bool:
        return host in self._allowed or name in self._allowed


def _name(host: str) -> str | None:
    """The host of `host:port`; None if malformed."""
    try:
        found = urlsplit(f"//{host}")
        _ = found.port
    except ValueError:
        return None
    if found.path or found.query or found.fragment or "@" in host:
        return None
    return (found.hostname or "").rstrip(".") or None
