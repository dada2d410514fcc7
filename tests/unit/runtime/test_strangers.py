"""Peers that have not proved themselves get little: small frames, few connections, a short time; a
worker comes in all the same.
"""

import asyncio
import contextlib
import gc
import struct
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from hub_peer import dial, next_message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.one_key import OneKey
from slackwater.model.ids import WorkerId
from slackwater.runtime.launch.launch_plan import LaunchPlan
from slackwater.runtime.launch.node_keys import NodeKeys
from slackwater.runtime.net.depot import Depot
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.wire import messages
from slackwater.wire.certificate import Certificate
from slackwater.wire.frames import MAX_STRANGER_FRAME_BYTES, Frame, FrameDecoder

KEY = "the worker's key"
HELLO = messages.Hello("w", "trainer")
ANNOUNCED = struct.pack("<2sBBI", b"SW", 1, 1, 1 << 30)
DEADLINE_S = 60.0


class Nobody:
    """Who joined."""

    def __init__(self) -> None:
        self.joined: list[str] = []

    def worker_joined(self, hello: messages.Hello) -> None:
        self.joined.append(hello.worker)

    def handle_frames(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        """Nothing to keep."""

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        """Nothing to keep."""


def plan_without_workers(folder: Path) -> LaunchPlan:
    return LaunchPlan(NodeKeys(StateDirectory(folder)))


def strangers_bytes() -> int:
    """What this process holds of frames that have not arrived whole."""
    gc.collect()
    decoders = (found for found in gc.get_objects() if isinstance(found, FrameDecoder))
    return sum(len(decoder._buffer) for decoder in decoders)


def with_hub(scenario: Callable[[WorkerHub], Awaitable[None]], **options: int) -> Nobody:
    heard = Nobody()

    async def run() -> None:
        hub = WorkerHub(OneKey(KEY), **options)  # type: ignore[arg-type]
        await hub.start(heard)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scenario(hub)
        finally:
            await hub.close()

    asyncio.run(run())
    return heard


def test_a_huge_frame_is_refused_at_its_header_before_anything_is_kept() -> None:
    async def scenario(hub: WorkerHub) -> None:
        most = 0
        for _ in range(20):
            reader, writer = await asyncio.open_connection(*hub.address)
            writer.write(ANNOUNCED + bytes(1 << 18))
            refused = await next_message(reader)
            most = max(most, strangers_bytes())
            assert isinstance(refused, messages.HelloRefused)
            assert "above the limit" in refused.reason
            writer.close()
        assert most <= MAX_STRANGER_FRAME_BYTES

    with_hub(scenario)


def test_strangers_that_begin_frames_are_few_and_hold_little_and_a_worker_still_comes_in() -> None:
    most = 8

    async def scenario(hub: WorkerHub) -> None:
        held = []
        begun = struct.pack("<2sBBI", b"SW", 1, 1, MAX_STRANGER_FRAME_BYTES)
        for _ in range(5 * most):
            _, writer = await asyncio.open_connection(*hub.address)
            writer.write(begun + bytes(MAX_STRANGER_FRAME_BYTES - 1))
            await writer.drain()
            held.append(writer)
            frame_bytes = MAX_STRANGER_FRAME_BYTES + len(begun)
            assert strangers_bytes() <= most * frame_bytes
        _, _, answer = await dial(hub, HELLO, KEY)
        assert isinstance(answer, messages.Welcome)
        for writer in held:
            writer.close()

    heard = with_hub(scenario, most_strangers=most)
    assert heard.joined in ([], ["w"])  # the hello may still be on its way


def test_nothing_but_a_handshake_is_heard_before_it_is_over() -> None:
    async def scenario(hub: WorkerHub) -> None:
        request = messages.encode(messages.ConnectRequest("w", bytes(32)))
        for said in (request + messages.encode(HELLO), request * 2):
            reader, writer = await asyncio.open_connection(*hub.address)
            writer.write(said)
            refused = await next_message(reader)
            assert isinstance(refused, messages.HelloRefused)
            assert "one message at a time" in refused.reason
            writer.close()

    assert with_hub(scenario).joined == []


def test_a_worker_that_says_another_name_than_it_proved_is_refused() -> None:
    async def scenario(hub: WorkerHub) -> None:
        reader, _, answer = await dial(hub, messages.Hello("other", "trainer"), KEY, name="w")
        assert isinstance(answer, messages.Welcome)
        refused = await next_message(reader)
        assert isinstance(refused, messages.HelloRefused)
        assert "w says that it is 'other'" in refused.reason

    assert with_hub(scenario).joined == []


STARTS = st.sampled_from(
    [
        b"",
        b"SW",
        ANNOUNCED,
        messages.encode(messages.ConnectRequest("w", bytes(32))),
        messages.encode(messages.ConnectRequest("w", bytes(32)))[:-3],
        messages.encode(messages.ChallengeResponse(bytes(32))),
        messages.encode(HELLO),
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pieces=st.lists(st.one_of(STARTS, st.binary(max_size=300)), max_size=6))
def test_whatever_a_stranger_sends_it_is_not_let_in_and_a_worker_is(pieces: list[bytes]) -> None:
    async def scenario(hub: WorkerHub) -> None:
        reader, writer = await asyncio.open_connection(*hub.address)
        for piece in pieces:
            writer.write(piece)
        writer.write_eof()
        await reader.read(-1)  # until the hub hangs up
        writer.close()
        _, _, answer = await dial(hub, HELLO, KEY)
        assert isinstance(answer, messages.Welcome)

    assert with_hub(scenario).joined in ([], ["w"])


def test_the_depot_hears_few_strangers_and_those_not_for_long(tmp_path: Path) -> None:
    async def ended(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""

    async def scenario(encrypted: bool) -> None:
        certificate = Certificate.load_or_create(tmp_path) if encrypted else None
        plan = plan_without_workers(tmp_path / "state")
        depot = Depot(tmp_path / "state", {}, plan, most_strangers=4, stranger_s=0.5)
        await depot.start("127.0.0.1", 0, None if certificate is None else certificate.context())
        try:
            async with asyncio.timeout(DEADLINE_S):
                opened = [await asyncio.open_connection("127.0.0.1", depot.port) for _ in range(12)]
                for _, writer in opened[:6]:
                    writer.write(
                        b"POST /files/weights/x HTTP/1.1\r\nContent-Length: 1099511627776\r\n"
                    )
                await asyncio.gather(*(ended(reader) for reader, _ in opened))
                for _, writer in opened:
                    writer.close()
        finally:
            await depot.close()

    for encrypted in (False, True):
        asyncio.run(scenario(encrypted))


def test_the_depot_reads_no_body_of_a_stranger(tmp_path: Path) -> None:
    async def scenario() -> None:
        depot = Depot(tmp_path, {}, plan_without_workers(tmp_path))
        await depot.start("127.0.0.1", 0, None)
        try:
            async with asyncio.timeout(DEADLINE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", depot.port)
                head = (
                    b"PUT /uploads/a/b HTTP/1.1\r\nHost: x\r\nContent-Length: 1099511627776\r\n\r\n"
                )
                writer.write(head + bytes(1 << 16))
                assert b" 401 " in await reader.readline()
                writer.close()
        finally:
            await depot.close()

    asyncio.run(scenario())
    assert not list(tmp_path.rglob("b"))
