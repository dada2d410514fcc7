"""The control plane's end of the channel: whatever a front end sends, the plane lives on."""

import asyncio
import itertools
import socket
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.service_plane import with_plane
from slackwater.model.errors import SlackwaterError
from slackwater.model.ids import TenantId
from slackwater.model.sampling import Sampling
from slackwater.runtime.executors.turn_results import TurnResult, TurnTokens
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.front.channel import FrontChannel
from slackwater.serve.front.gateway import Gateway
from slackwater.wire import front
from slackwater.wire.frames import FrameDecoder, FrameKind, encode_frame

PROMPT = b"\x01\0\0\0"


def frame_of(*records: front.Record) -> bytes:
    return front.join_records([front.encode_record(record) for record in records])


class Visitor:
    """The other end of a channel, byte by byte; what was spent is counted apart."""

    def __init__(self, channel: FrontChannel) -> None:
        self._channel = channel
        channel.open()
        self._decoder = FrameDecoder()
        self._heard: list[front.ToFront] = []
        self.spent: defaultdict[str, float] = defaultdict(float)

    async def __aenter__(self) -> "Visitor":
        ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        await asyncio.get_running_loop().create_connection(self._channel.connect, sock=ours)
        assert isinstance(await self.next(), front.Setup)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._theirs.close()
        self._channel.close()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._theirs, data)

    async def ask(self, *records: front.Record) -> None:
        await self.send(frame_of(*records))

    async def next(self) -> front.ToFront | None:
        """The next record; None if the connection was closed."""
        async with asyncio.timeout(60):
            while not self._heard:
                data = await asyncio.get_running_loop().sock_recv(self._theirs, 1 << 16)
                if not data:
                    return None
                for frame in self._decoder.feed(data):
                    for record in front.decode_to_front(frame.body):
                        if isinstance(record, front.TimeCharged):
                            for name, seconds in record.seconds.items():
                                self.spent[name] += seconds
                        else:
                            self._heard.append(record)
        return self._heard.pop(0)


def generate(
    number: int, prompt: bytes = PROMPT, stream: bool = False, n: int = 1, **changed: str
) -> front.GenerateChoices:
    said = {"tenant": "mine", "job": "mine/j", "base_model": "tiny", "version": "base:tiny"}
    said |= changed
    return front.GenerateChoices(
        number,
        said["tenant"],
        said["job"],
        said["base_model"],
        said["version"],
        stream,
        None,
        Sampling(4),
        n,
        [prompt],
        [4],
    )


async def live(plane: ControlPlane, turns: int) -> None:
    async with asyncio.timeout(60):
        while plane.rollout.count_live_turns() != turns:  # noqa: ASYNC110  (nobody is told)
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        encode_frame(FrameKind.CONTROL, b"\xc1"),
        encode_frame(FrameKind.TOKENS, b"\0\0\0\0"),
        frame_of(generate(1, tenant="nobody")),
        frame_of(generate(1), generate(1)),
    ],
)
def test_what_is_no_record_closes_the_connection_and_nothing_else(
    tmp_path: Path, bad: bytes
) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        channel = FrontChannel(plane)
        async with Visitor(channel) as visitor:
            await visitor.send(bad)
            assert await visitor.next() is None
        async with Visitor(channel) as visitor:
            await visitor.ask(generate(1, stream=True))
            assert await visitor.next() == front.ChoicesAccepted(1)
        assert not plane.failed.is_set()

    with_plane(tmp_path, work)


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        (generate(1, prompt=b"\x01\0"), 422, "whole tokens"),
        (generate(1, prompt=b""), 422, "whole tokens"),
        (generate(1, n=0), 422, "must be positive"),
        (generate(1, n=1 << 60), 422, "prompts x n"),
        (generate(1, base_model="other"), 404, "not served here"),
        (front.Sample(1, "mine", "ss-no", 0, b"x"), 404, "not one of yours"),
        (front.AskSession(1, "mine", "ss-no"), 404, "not one of yours"),
        (front.AskModel(1, "mine", "no"), 404, "not served here"),
        (front.AskFuture(1, "mine", "sm-no", 0.0), 404, "not a request of yours"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_number(
    tmp_path: Path, asked: front.FromFront, status: int, message: str
) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        async with Visitor(FrontChannel(plane)) as visitor:
            await visitor.ask(asked)
            refused = await visitor.next()
            assert isinstance(refused, front.RequestRefused)
            assert (refused.number, refused.status) == (1, status)
            assert message in refused.message

    with_plane(tmp_path, work)


def test_a_front_end_that_goes_takes_its_generations_and_leaves_their_share(
    tmp_path: Path,
) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        async with Visitor(FrontChannel(plane)) as visitor:
            await visitor.ask(*(generate(number) for number in range(1, 6)))
            await live(plane, 5)
            await visitor.ask(front.AbandonChoices("mine", 2, 1))
            await live(plane, 4)
        await live(plane, 0)
        assert not plane.shares.live()

    with_plane(tmp_path, work)


def test_choices_that_are_abandoned_before_they_began_never_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        begun = 0
        submit = plane.rollout.submit

        def counted(*turn: Any) -> None:
            nonlocal begun
            begun += 1
            submit(*turn)

        monkeypatch.setattr(plane.rollout, "submit", counted)
        async with Visitor(FrontChannel(plane)) as visitor:
            await visitor.ask(generate(1, n=1000))
            async with asyncio.timeout(60):
                while not plane.rollout.count_live_turns():  # noqa: ASYNC110  (nobody is told)
                    await asyncio.sleep(0)
            await visitor.ask(front.AbandonChoices("mine", 1, 1000))
            await live(plane, 0)
            assert 0 < begun < 1000
            assert not plane.shares.live()

    with_plane(tmp_path, work)


def test_choices_that_are_abandoned_with_their_request_take_no_share(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        async with Visitor(FrontChannel(plane)) as visitor:
            both = generate(1, stream=True, n=1000), front.AbandonChoices("mine", 1, 1000)
            await visitor.ask(*both, generate(1001, stream=True))
            assert await visitor.next() == front.ChoicesAccepted(1001)
            assert plane.shares.live() == {TenantId("mine"): 1}
            assert plane.rollout.count_live_turns() == 1

    with_plane(tmp_path, work)


def test_a_front_end_that_goes_leaves_the_share_of_choices_that_were_not_submitted(
    tmp_path: Path,
) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        async with Visitor(FrontChannel(plane)) as visitor:
            await visitor.ask(generate(1, n=1000))
            async with asyncio.timeout(60):
                while not plane.rollout.count_live_turns():  # noqa: ASYNC110  (nobody is told)
                    await asyncio.sleep(0)
            assert plane.rollout.count_live_turns() < 1000
        await live(plane, 0)
        assert not plane.shares.live()

    with_plane(tmp_path, work)


def test_a_stream_is_accepted_at_once_and_others_say_so_by_their_end(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        async with Visitor(FrontChannel(plane)) as visitor:
            await visitor.ask(generate(1))
            await live(plane, 1)
            await visitor.ask(generate(2, stream=True))
            assert await visitor.next() == front.ChoicesAccepted(2)

    with_plane(tmp_path, work)


def test_numbers_of_choices_do_not_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 1 << 32

    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        submitted: list[Any] = []
        monkeypatch.setattr(plane.rollout, "submit", lambda *turn: submitted.append(turn[1]))
        gateway = Gateway()
        gateway._numbers = itertools.count(number)
        loop, channel = asyncio.get_running_loop(), FrontChannel(plane)
        channel.open()
        ours, theirs = socket.socketpair()
        await loop.create_connection(channel.connect, sock=ours)
        await loop.create_connection(lambda: gateway.connection, sock=theirs)
        async with asyncio.timeout(60):
            assert await gateway.ready
            listener = _Listener()
            made = gateway.generate(generate(0, stream=True), [listener])
            assert await made == [number]
            submitted[0].stream([7, 8], [-1.0, -2.0])
            assert await listener.tokens == [7, 8]
        gateway.close()
        channel.close()

    with_plane(tmp_path, work)


class _Listener:
    """Who waits for a choice's first tokens."""

    def __init__(self) -> None:
        self.tokens: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

    def on_tokens(self, more: TurnTokens) -> None:
        self.tokens.set_result(list(more.tokens))

    def on_complete(self, result: TurnResult) -> None: ...
    def on_failure(self, error: SlackwaterError) -> None: ...


def test_a_front_end_is_told_what_the_control_plane_did_for_each_tenant(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        async with Visitor(FrontChannel(plane)) as visitor:
            for number in range(1, 4):
                await visitor.ask(generate(number, stream=True))
                await visitor.next()
            so_far = plane.queues.shares.totals[TenantId("mine")]
            async with asyncio.timeout(60):
                while visitor.spent["mine"] < 0.99 * so_far:
                    await visitor.ask(front.AskModel(9, "mine", "no"))
                    await visitor.next()
                    await asyncio.sleep(0)
            assert so_far > 0
            assert "other" not in visitor.spent

    with_plane(tmp_path, work)
