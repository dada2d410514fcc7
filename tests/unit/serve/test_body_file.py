"""Large training batches go to a file, which a helper reads: nobody between has them in memory."""

import asyncio
import gzip
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_app import open_model

from harness.service_plane import with_plane
from slackwater.model.errors import UnavailableError
from slackwater.model.ids import TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.front.pass_through import PassThrough
from slackwater.serve.http.body_file import HEADER, BodyFile, remove_body_files
from slackwater.serve.http.large_bodies import BODY
from slackwater.serve.http.limits import BodyLimits
from slackwater.serve.http.server import PrivateServer
from slackwater.serve.http.whole_bodies import WholeBodies
from slackwater.serve.tinker.pass_reader import PROTOBUF, batch_of, read_pass_file
from slackwater.serve.tinker.proto import pb
from slackwater.wire.batches import decode_batch

PIECE = b"0123456789abcdef" * (1 << 12)  # 64 KiB


def read(
    folder: Path, path: str, pieces: list[bytes], encoding: bytes = b"", leaves: bool = False
) -> list[tuple[bytes, bytes | None]]:
    """What the application gets: the body, and what is in its file."""
    seen: list[tuple[bytes, bytes | None]] = []
    left = list(pieces)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = scope[BODY]
        seen.append((body.take(), None if body.file is None else body.file.read_bytes()))

    async def receive() -> dict[str, Any]:
        if leaves and len(left) == 1:
            return {"type": "http.disconnect"}
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    async def send(message: Any) -> None: ...

    limits = BodyLimits(
        app,
        max_bytes=1 << 20,
        stall_s=60,
        json_limits={"/pass": 1 << 20},
        tenant_of=lambda headers: TenantId("me"),
        folder=folder,
    )
    headers = [(b"content-type", b"application/x-protobuf")]
    headers += [(b"content-encoding", encoding)] if encoding else []
    asyncio.run(limits({"type": "http", "path": path, "headers": headers}, receive, send))
    assert list(folder.iterdir()) == [], "the file goes with its request"
    return seen


def test_a_large_body_is_in_a_file_while_its_request_lasts(tmp_path: Path) -> None:
    pieces = [PIECE, b"more", PIECE, b"end"]
    assert read(tmp_path, "/pass", pieces) == [(b"", b"".join(pieces))]
    assert read(tmp_path, "/pass", pieces, leaves=True) == []


def test_small_bodies_compressed_ones_and_those_of_other_paths_are_not(tmp_path: Path) -> None:
    assert read(tmp_path, "/pass", [PIECE]) == [(PIECE, None)]
    assert read(tmp_path, "/other", [PIECE, PIECE]) == [(PIECE * 2, None)]
    packed = gzip.compress(PIECE * 2, compresslevel=0)
    assert read(tmp_path, "/pass", [packed], b"gzip") == [(PIECE * 2, None)]


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    file = BodyFile(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        file.write([PIECE])
    file.close()
    assert file.path is None


def test_the_bodies_of_a_dead_process_are_removed_and_no_others(tmp_path: Path) -> None:
    body = BodyFile(tmp_path)
    body.write([PIECE])
    assert body.path is not None
    of_another = tmp_path / body.path.name.replace(str(os.getpid()), f"{os.getpid()}0")
    for other in (of_another, batch_of(body.path)):  # a helper's batch is its reader's
        other.touch()
    remove_body_files(tmp_path, os.getpid())
    assert {other.name for other in tmp_path.iterdir()} == {
        of_another.name,
        batch_of(body.path).name,
    }
    body.close()


def batch(tokens: int) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().encoded_text.tokens = bytes(4 * tokens)
    encoded: bytes = message.SerializeToString()
    return encoded


def test_a_helper_writes_the_batch_beside_the_body_and_says_when_the_body_has_gone(
    tmp_path: Path,
) -> None:
    body = tmp_path / "body"
    body.write_bytes(batch(10))
    head = read_pass_file(body, PROTOBUF)
    assert (head.model_id, head.seq_id, head.error) == ("m", 1, None)
    (example,) = decode_batch(batch_of(body).read_bytes()).examples
    assert example.tokens.numpy().tolist() == [0] * 10
    body.unlink()
    with pytest.raises(UnavailableError, match="try again"):
        read_pass_file(body, PROTOBUF)


def test_a_client_cannot_name_a_file_itself(tmp_path: Path) -> None:
    """Of what goes to the control plane only the front end says where the body is."""
    files: list[Path | None] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        files.append(scope[BODY].file)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def scenario() -> None:
        whole: Any = WholeBodies(behind, lambda headers: None)
        server = PrivateServer(whole, tmp_path / "socket")
        serving = asyncio.create_task(server.serve())
        async with asyncio.timeout(60):
            while not server.started:  # noqa: ASYNC110  (uvicorn tells nobody)
                await asyncio.sleep(0.01)
        folder = tmp_path / "bodies"
        folder.mkdir()
        passing = PassThrough(tmp_path / "socket")
        front = BodyLimits(
            passing, max_bytes=1 << 20, stall_s=60, json_limits={"/pass": 1 << 20}, folder=folder
        )
        transport = httpx.ASGITransport(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            said = {HEADER.decode(): "/etc/passwd"}
            await client.post("/other", content=b"x", headers=said)
            await client.post("/pass", content=PIECE * 2, headers=said)
        await passing.close()
        server.stop()
        await serving

    asyncio.run(scenario())
    assert files[0] is None
    assert files[1] is not None
    assert files[1].parent.name == "bodies"


def test_a_large_batch_is_the_operation_that_it_is_in_one_piece(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        _, model, _ = await open_model(client)
        message = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy")
        message.data.add().model_input.add().encoded_text.tokens = bytes(1 << 20)
        body, kind = message.SerializeToString(), {"content-type": "application/x-protobuf"}

        async def taken() -> Any:
            answer = await client.post("forward_backward", content=body, headers=kind)
            assert answer.status_code == 200, answer.text
            return answer.json()

        first = await taken()
        assert await taken() == first, "a retry is the same operation"
        message.model_id = "other"
        body = message.SerializeToString()
        answer = await client.post("forward_backward", content=body, headers=kind)
        assert answer.status_code == 404

    with_plane(tmp_path, work)
