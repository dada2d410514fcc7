"""Compressed bodies: undone for every route, within the same limits."""

import gzip
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import zstandard

from harness.service_plane import with_plane
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.http.encodings import RefusedBodyError, decompress, encoding_of

PRESSED: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstandard.compress}


@pytest.mark.parametrize("encoding", PRESSED)
def test_a_small_body_cannot_blow_up_when_decompressed(encoding: str) -> None:
    bomb = PRESSED[encoding](b"\0" * (1 << 20))
    assert len(bomb) < 2000
    assert len(decompress(bomb, encoding, 1 << 20)) == 1 << 20
    with pytest.raises(RefusedBodyError, match="decompressed") as refused:
        decompress(bomb, encoding, (1 << 20) - 1)
    assert refused.value.status == 413
    with pytest.raises(RefusedBodyError, match="cannot be decompressed") as refused:
        decompress(b"neither", encoding, 100)
    assert refused.value.status == 422


def test_gzip_may_have_several_members_and_must_be_whole() -> None:
    assert decompress(gzip.compress(b"ab") + gzip.compress(b"cd"), "gzip", 100) == b"abcd"
    with pytest.raises(RefusedBodyError, match="truncated"):
        decompress(gzip.compress(b"ab")[:-1], "gzip", 100)
    with pytest.raises(RefusedBodyError, match="cannot be decompressed"):
        decompress(gzip.compress(b"ab") + b"more", "gzip", 100)


def test_other_encodings_are_refused_by_name() -> None:
    assert encoding_of(None) == encoding_of("identity") == ""
    assert encoding_of("X-GZIP") == "gzip"
    for name in ("br", "gzip, gzip", "deflate"):
        with pytest.raises(RefusedBodyError, match="Content-Encoding") as refused:
            encoding_of(name)
        assert refused.value.status == 415


def test_every_route_takes_compressed_bodies(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        async def sent(body: bytes, encoding: str) -> httpx.Response:
            headers = {"content-encoding": encoding, "content-type": "application/json"}
            return await client.post("create_session", content=body, headers=headers)

        for encoding, press in PRESSED.items():
            answer = await sent(press(b'{"sdk_version": "0"}'), encoding)
            assert answer.status_code == 200, answer.text
            bomb = await sent(press(b" " * (8 << 20)), encoding)
            assert bomb.status_code == 413
            assert "decompressed" in bomb.json()["error"]
        assert (await sent(b"{}", "br")).status_code == 415

    with_plane(tmp_path, work)
