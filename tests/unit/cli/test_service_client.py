"""Commands that ask a service again and again read the certificates at most once."""

import ssl

import pytest

from slackwater.cli.running_service import ServiceClient


@pytest.mark.parametrize(("scheme", "most"), [("http", 0), ("https", 1)])
def test_clients_read_certificates_at_most_once_and_never_without_tls(
    scheme: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[ssl.SSLContext] = []
    load = ssl.SSLContext.load_verify_locations

    def loaded(self: ssl.SSLContext, *given: str, **named: str) -> None:
        read.append(self)
        load(self, *given, **named)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", loaded)
    for _ in range(3):
        ServiceClient(f"{scheme}://127.0.0.1:1", "key")
    assert len(read) <= most
    assert all(context.verify_mode is ssl.CERT_REQUIRED for context in read)
