"""Sample requests: durable before they are acknowledged, told apart by number, refused when there
are too many.
"""

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from harness.one_key import OneKey
from slackwater.control.fleet.controller import FleetController
from slackwater.model.errors import (
    ConfigError,
    NotFoundError,
    RefusedError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.model.ids import (
    JobId,
    RequestId,
    SamplingSessionId,
    SessionId,
    TenantId,
    TurnId,
    WorkerId,
)
from slackwater.model.session import SamplingSession
from slackwater.runtime.executors.engines import EngineExecutor
from slackwater.runtime.live_driver import live_driver
from slackwater.runtime.net.background import Background
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.services.loop_shares import FairWork, LoopShares, TenantQueues
from slackwater.runtime.services.sampling import SamplingService
from slackwater.runtime.services.tenants import TurnShares
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.op_payloads import SamplePayload, encode
from slackwater.runtime.store.outcomes import FutureBoard
from slackwater.runtime.store.sampling_sessions import add_sampling_session
from slackwater.wire import messages
from slackwater.wire.frames import HEADER_BYTES, Frame, FrameKind

MINE = TenantId("mine")
SESSION = SamplingSession(
    SamplingSessionId("ss"), MINE, SessionId("s"), "tiny", "base:tiny", "tiny|client 0"
)


class Nobody:
    """No worker ever comes, so what is submitted waits."""

    def worker_joined(self, hello: object) -> None: ...
    def handle_frames(self, worker: str, frames: object) -> None: ...
    def worker_lost(self, worker: str, reason: str) -> None: ...


CONTROLLERS: list[FleetController] = []  # of the services, in order


def body_of(message: messages.Message) -> bytes:
    return messages.encode(message)[HEADER_BYTES:]


def sample(token: int = 1, samples: int = 1) -> SamplePayload:
    return SamplePayload(
        prompt=np.array([token], "<i4").tobytes(),
        seeds=list(range(samples)),
        max_tokens=4,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop_token_ids=[],
        stop_strings=[],
        prompt_logprobs=False,
        topk_prompt_logprobs=0,
        topk_logprobs=0,
    )


def with_desk(
    folder: Path,
    work: Callable[[SamplingService, EngineExecutor, FutureBoard], Awaitable[None]],
    engines: Sequence[tuple[str, messages.HeldTurns]] = (),
) -> None:
    """A desk on the folder's store, with everything real and no engine; what `engines` held for the
    control plane before.
    """

    async def scenario() -> None:
        store = Store(f"sqlite:///{folder / 'db'}")
        await store.open()
        await store.call(lambda c: add_sampling_session(c, SESSION, 0, 1.0))
        board, died = FutureBoard(), list[BaseException]()
        background = Background(died.append)
        hub = WorkerHub(OneKey("secret"))
        CONTROLLERS.append(FleetController())
        runtime = live_driver(CONTROLLERS[-1])
        rollout = EngineExecutor(runtime, hub, release=lambda worker: None)
        shares = TurnShares(8, ["mine", "other"])
        loop_shares = LoopShares(1)
        queues, fair_work = TenantQueues(loop_shares), FairWork(loop_shares)
        desk = SamplingService(store, board, background, rollout, shares, queues, fair_work, JobId)
        await desk.adopt()
        for worker, message in engines:
            rollout.handle_frame(WorkerId(worker), Frame(FrameKind.CONTROL, body_of(message)))
        desk.resume()
        await work(desk, rollout, board)
        await background.drain(60.0)
        runtime.close()
        await store.close()
        assert died == []

    asyncio.run(scenario())


async def submit(
    desk: SamplingService, session: SamplingSession, seq: int, sample: SamplePayload
) -> RequestId:
    """When it is durable."""
    taken: asyncio.Future[RequestId] = asyncio.get_running_loop().create_future()

    def told(request: RequestId | SlackwaterError, new: bool) -> None:
        if isinstance(request, SlackwaterError):
            taken.set_exception(request)
        else:
            taken.set_result(request)

    desk.accept(session, seq, encode(sample), told)
    async with asyncio.timeout(60):
        request = await taken
        await asyncio.sleep(0)  # its turns are submitted by now
    return request


def test_a_number_sent_again_is_the_same_request_and_is_generated_once(tmp_path: Path) -> None:
    async def work(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        first = await submit(desk, SESSION, 0, sample())
        assert await submit(desk, SESSION, 0, sample()) == first
        assert await submit(desk, SESSION, 2**60, sample()) != first
        assert rollout.count_live_turns() == 2
        with pytest.raises(RefusedError, match="seq_id: 0"):
            await submit(desk, SESSION, 0, sample(token=2))

    with_desk(tmp_path, work)


def test_a_number_sent_again_among_others_is_found_out_and_its_neighbours_are_taken(
    tmp_path: Path,
) -> None:
    async def work(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        first = await submit(desk, SESSION, 1, sample())
        asked = (submit(desk, SESSION, number, sample()) for number in (0, 1, 2))
        before, again, after = await asyncio.gather(*asked)
        assert again == first
        assert len({before, again, after}) == rollout.count_live_turns() == 3

    with_desk(tmp_path, work)


def test_too_many_turns_are_told_to_try_again_and_leave_no_trace(tmp_path: Path) -> None:
    async def work(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        await submit(desk, SESSION, 0, sample(samples=3))
        with pytest.raises(UnavailableError, match="3 samples of yours are under way"):
            await submit(desk, SESSION, 1, sample(samples=2))
        request = await submit(desk, SESSION, 1, sample())
        assert rollout.count_live_turns() == 4
        desk.cancel(MINE, request)
        assert rollout.count_live_turns() == 3

    with_desk(tmp_path, work)


def test_alternatives_count_towards_a_tenants_turns_until_they_are_given(tmp_path: Path) -> None:
    def named(samples: int, **counts: int) -> SamplePayload:
        return msgspec.structs.replace(sample(samples=samples), **counts)

    async def work(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        for many in (
            named(1, max_tokens=16, topk_logprobs=1024),
            named(4, max_tokens=4, topk_logprobs=1024),
            named(1, topk_prompt_logprobs=4 * 4096),
            named(1, alternatives=4 * 4096),
        ):
            with pytest.raises(ConfigError, match=r"samples x tokens x alternatives: (5|8)\b"):
                await submit(desk, SESSION, 0, many)
        request = await submit(desk, SESSION, 0, named(2, max_tokens=4, topk_logprobs=1024))
        with pytest.raises(UnavailableError, match="4 samples of yours"):
            await submit(desk, SESSION, 1, sample())
        desk.cancel(MINE, request)
        await submit(desk, SESSION, 1, sample(samples=4))
        assert rollout.count_live_turns() == 4

    with_desk(tmp_path, work)


def test_one_tenants_turns_take_nothing_of_anothers_room(tmp_path: Path) -> None:
    theirs = dataclasses.replace(
        SESSION, tenant=TenantId("other"), sampling_session=SamplingSessionId("theirs")
    )

    async def work(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        await submit(desk, SESSION, 0, sample(samples=4))
        with pytest.raises(UnavailableError):
            await submit(desk, SESSION, 1, sample())
        await submit(desk, theirs, 0, sample(samples=4))
        assert rollout.count_live_turns() == 8

    with_desk(tmp_path, work)


def test_what_was_acknowledged_goes_on_after_a_restart(tmp_path: Path) -> None:
    requests: list[str] = []

    async def before(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        requests.append(await submit(desk, SESSION, 0, sample(samples=2)))

    async def after(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        assert rollout.count_live_turns() == 2
        assert not await board.wait(requests[0], 0.01)  # type: ignore[arg-type]
        assert await submit(desk, SESSION, 0, sample(samples=2)) == requests[0]
        assert rollout.count_live_turns() == 2

    with_desk(tmp_path, before)
    with_desk(tmp_path, after)


def test_turns_resume_from_the_tokens_that_their_engines_still_have(tmp_path: Path) -> None:
    requests: list[str] = []
    tokens = np.array([7, 8, 9], "<u4").tobytes()
    logprobs = np.array([-0.5, -1.0, -1.5], "<f4").tobytes()

    async def before(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        requests.append(await submit(desk, SESSION, 0, sample(samples=4)))

    def held(index: int, version: str = SESSION.version, cut: int = 0) -> messages.HeldTurn:
        name = f"{requests[0]}/{index}"
        return messages.HeldTurn(name, version, tokens, logprobs[cut:])

    async def after(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        turns = CONTROLLERS[-1].rollout.state.turns
        found = [list(turns[TurnId(f"{requests[0]}/{index}")].tokens) for index in range(4)]
        assert found == [[7, 8, 9], [], [], []]  # of another version, damaged, not reported
        scores = turns[TurnId(f"{requests[0]}/0")].logprobs
        assert list(scores) == [-0.5, -1.0, -1.5]

    with_desk(tmp_path, before)
    report = messages.HeldTurns([held(0), held(1, "another"), held(2, cut=4)])
    with_desk(tmp_path, after, [("e.1", report)])


@pytest.mark.parametrize(("count", "score"), [(10_000, -0.5), (3, float("nan")), (3, -math.inf)])
def test_what_no_engine_can_have_sampled_is_not_believed(
    tmp_path: Path, count: int, score: float
) -> None:
    requests: list[str] = []

    async def before(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        requests.append(await submit(desk, SESSION, 0, sample()))

    async def after(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        turn = CONTROLLERS[-1].rollout.state.turns[TurnId(f"{requests[0]}/0")]
        assert len(turn.tokens) == 0

    with_desk(tmp_path, before)
    tokens, scores = np.full(count, 7, "<u4").tobytes(), np.full(count, score, "<f4").tobytes()
    lie = messages.HeldTurn(f"{requests[0]}/0", SESSION.version, tokens, scores)
    with_desk(tmp_path, after, [("e.1", messages.HeldTurns([lie]))])


def test_an_engine_is_believed_once_and_no_more_than_an_engine_keeps(tmp_path: Path) -> None:
    tokens = np.full(1 << 12, 7, "<u4").tobytes()
    scores = np.full(1 << 12, -0.5, "<f4").tobytes()

    def report(prefix: str, turns: int, length: int = 4) -> messages.HeldTurns:
        return messages.HeldTurns(
            [
                messages.HeldTurn(f"{prefix}/{i}", "v", tokens[:length], scores[:length])
                for i in range(turns)
            ]
        )

    def kept(*reports: tuple[str, messages.HeldTurns]) -> int:
        rollout = EngineExecutor(
            live_driver(FleetController()),
            WorkerHub(OneKey("secret")),
            release=lambda worker: None,
        )
        for worker, message in reports:
            rollout.handle_frame(WorkerId(worker), Frame(FrameKind.CONTROL, body_of(message)))
        return len(rollout.take_returned_turns())

    most = messages.MAX_HELD_TURNS
    assert kept(("e.1", report("a", most + 100))) == most
    assert kept(("e.1", report("a", 3)), ("e.1", report("b", 3)), ("e.2", report("c", 3))) == 6
    few = messages.MAX_HELD_TOKENS // (len(tokens) // 4)  # as many long ones
    assert few <= kept(("e.1", report("a", 2 * few, len(tokens)))) < 2 * few


def test_requests_of_an_ended_session_fail_and_say_so(tmp_path: Path) -> None:
    async def work(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        request = await submit(desk, SESSION, 0, sample())
        desk.drop_sessions([SESSION.sampling_session])
        assert await board.wait(request, 60.0)
        outcome = board.recent(request)
        assert outcome is not None
        assert outcome.error == "its sampling session has ended"
        assert rollout.count_live_turns() == 0
        with pytest.raises(NotFoundError):
            desk.session(MINE, "ss")

    with_desk(tmp_path, work)


def test_another_tenant_neither_sees_nor_cancels(tmp_path: Path) -> None:
    async def work(desk: SamplingService, rollout: EngineExecutor, board: FutureBoard) -> None:
        request = await submit(desk, SESSION, 0, sample())
        desk.cancel(TenantId("other"), request)
        assert rollout.count_live_turns() == 1
        with pytest.raises(NotFoundError):
            desk.session(TenantId("other"), "ss")

    with_desk(tmp_path, work)
