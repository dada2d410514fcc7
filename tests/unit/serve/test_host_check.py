"""By which names and from which pages the service may be called."""

import asyncio
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from harness.service_plane import with_plane
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.http.host_check import HostCheck


async def served(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def asked(
    *headers: tuple[str, str],
    method: str = "POST",
    bound: str = "127.0.0.1",
    allowed: tuple[str, ...] = (),
) -> int:
    """The status that a request with these headers gets."""
    statuses: list[int] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(int(str(message["status"])))

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": method, "path": "/api/v1/asample", "headers": raw}
    check = HostCheck(served, bound=bound, allowed=allowed)
    asyncio.run(check(scope, receive, send))  # type: ignore[arg-type]  # plain dicts
    return statuses[0]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8123",
        "127.0.0.1:8123",
        "127.0.0.9",
        "0.0.0.0:8123",
        "[::1]:8123",
        "localhost.:80",
    ],
)
def test_the_loopback_and_the_bound_address_are_the_services(host: str) -> None:
    assert asked(("Host", host)) == 204
    assert asked(("Host", "10.1.2.3:8123"), bound="10.1.2.3") == 204


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8123", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("10.1.2.3", "user@localhost", "localhost:80@evil.example", "localhost/..", "a:b:c"),
    ],
)
def test_a_name_that_is_not_the_services_is_misdirected(host: str) -> None:
    for method in ("GET", "POST"):
        assert asked(("Host", host), method=method) == 421


def test_any_address_but_no_name_where_every_address_is_bound() -> None:
    for bound in ("0.0.0.0", "::"):
        assert asked(("Host", "192.168.7.7:8123"), bound=bound) == 204
        assert asked(("Host", "[fd00::7]:8123"), bound=bound) == 204
        assert asked(("Host", "rebound.example:8123"), bound=bound) == 421


def test_the_operator_lists_names_and_may_allow_any() -> None:
    for allowed in (("gpu.example",), ("GPU.example:443",), ("*",)):
        assert asked(("Host", "gpu.example:443"), allowed=allowed) == 204
    assert asked(("Host", "gpu.example:80"), allowed=("gpu.example:443",)) == 421


def test_a_probe_without_a_host_passes_and_two_hosts_do_not() -> None:
    assert asked(method="GET") == 204
    assert asked(("Host", "localhost"), ("Host", "evil.example")) == 400


def test_another_sites_page_changes_nothing() -> None:
    host = ("Host", "localhost:8123")
    for origin in ("https://evil.example", "null", "http://localhost:3000", "", "file://"):
        assert asked(host, ("Origin", origin)) == 403
        assert asked(host, ("Origin", origin), allowed=("*",)) == 403
        assert asked(host, ("Origin", origin), method="DELETE") == 403
        assert asked(host, ("Origin", origin), method="GET") == 204  # it cannot read the answer
    assert asked(host, ("Origin", "http://localhost:8123")) == 204
    # A proxy that speaks TLS, with the host passed on and with it rewritten.
    proxied = ("Origin", "https://gpu.example")
    assert asked(("Host", "gpu.example"), proxied, allowed=("*",)) == 204
    assert asked(host, proxied, allowed=("gpu.example",)) == 204


def test_the_whole_application_is_behind_the_check(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        for path in ("/healthz", "/metrics", "/openapi.json", "/api/v1/get_server_capabilities"):
            answer = await client.get(f"http://test{path}", headers={"host": "evil.example"})
            assert answer.status_code == 421, path
            assert "--allowed-host" in answer.json()["error"]
            assert (await client.get(f"http://test{path}")).status_code == 200
        crossed = await client.post(
            "create_session", json={"sdk_version": "0"}, headers={"origin": "http://evil.example"}
        )
        assert crossed.status_code == 403
        assert "evil.example" in crossed.json()["error"]

    with_plane(tmp_path, work)
