"""The live parts one by one: store, hub, folder, tenants, futures."""

import asyncio
import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hub_peer import dial, next_message

from harness.one_key import OneKey
from slackwater.control.rollout.manager import RolloutManager
from slackwater.control.timer import TimerFired
from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.model.ids import ModelId, RequestId, SamplingSessionId, TenantId, WorkerId
from slackwater.model.operation import FaultOwner, Operation, OpKind, OpStatus
from slackwater.model.sampling import default_seed, sample_seed
from slackwater.runtime.live_driver import live_driver
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.services.tenants import Tenants
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store import database
from slackwater.runtime.store import operation_log as log
from slackwater.runtime.store.base_models import BaseModel, BaseModels
from slackwater.runtime.store.checkpoints import checkpoint_path, parse_path
from slackwater.runtime.store.database import Store, StoreLostError
from slackwater.runtime.store.outcomes import (
    FinishedRequest,
    FinishedRequestFeed,
    FutureBoard,
    RequestOutcome,
)
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.wire import messages
from slackwater.wire.frames import Frame


def submission(
    seq: int, kind: OpKind, payload: bytes, request: str, strict: bool = True
) -> log.Submission:
    operation = Operation(RequestId(request), ModelId("m"), seq, kind)
    return log.Submission(operation, TenantId("t"), payload, 1.0, strict)


def test_a_number_sent_again_gives_the_first_request_and_another_payload_is_refused(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        store = Store(f"sqlite:///{tmp_path / 'db'}")
        await store.open()
        first = submission(1, OpKind.OPTIM_STEP, b"a", "r1")
        assert await store.call(lambda c: log.add_operation(c, first)) == ("r1", True)
        again = submission(1, OpKind.OPTIM_STEP, b"a", "r2")
        assert await store.call(lambda c: log.add_operation(c, again)) == ("r1", False)
        other = submission(1, OpKind.OPTIM_STEP, b"b", "r3")
        with pytest.raises(RefusedError, match="seq_id: 1"):
            await store.call(lambda c: log.add_operation(c, other))
        lenient = submission(1, OpKind.OPTIM_STEP, b"b", "r4", strict=False)
        assert await store.call(lambda c: log.add_operation(c, lenient)) == ("r1", False)
        await store.close()

    asyncio.run(scenario())


def test_a_call_that_finds_the_disk_full_is_done_once_there_is_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = Store(f"sqlite:///{tmp_path / 'db'}")
        await store.open()
        # This connection may not grow the file; the one that the store opens next may.
        await store.call(lambda c: c.exec_driver_sql("PRAGMA max_page_count=1"))
        large = submission(1, OpKind.FORWARD_BACKWARD, bytes(1 << 20), "r1")
        assert await store.call(lambda c: log.add_operation(c, large)) == ("r1", True)
        assert await store.call(lambda c: log.payload_of(c, RequestId("r1"))) == bytes(1 << 20)
        await store.close()

    asyncio.run(scenario())


def test_a_disk_that_stays_full_ends_the_store_and_nothing_half_done_stays(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db'}"

    async def scenario() -> None:
        losses: list[str] = []
        store = Store(url, lambda: losses.append("lost"), patience_s=0.3)
        await store.open()

        def fill(connection: sa.Connection) -> None:
            log.add_operation(connection, submission(1, OpKind.OPTIM_STEP, b"", "r1"))
            connection.exec_driver_sql("PRAGMA max_page_count=1")
            large = submission(2, OpKind.FORWARD_BACKWARD, bytes(1 << 20), "r2")
            log.add_operation(connection, large)

        for _ in range(2):
            with pytest.raises(StoreLostError):
                await store.call(fill)
        assert losses == ["lost", "lost"]
        await store.close()
        again = Store(url)
        await again.open()
        assert await again.call(lambda c: log.records_after(c, ModelId("m"), 0)) == ()
        await again.close()

    asyncio.run(scenario())


def test_what_was_written_is_there_after_the_store_is_opened_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db'}"

    async def write() -> None:
        store = Store(url)
        await store.open()
        new = submission(3, OpKind.FORWARD_BACKWARD, b"batch", "r")
        await store.call(lambda c: log.add_operation(c, new))
        outcome = RequestOutcome("forward_backward", None, "no", FaultOwner.USER)
        await store.call(lambda c: log.finish_operation(c, RequestId("r"), outcome, 2.0))
        await store.close()

    async def read() -> None:
        store = Store(url)
        await store.open()
        (record,) = await store.call(lambda c: log.records_after(c, ModelId("m"), 2))
        assert (record.operation.seq, record.status) == (3, OpStatus.FAILED)
        assert await store.call(lambda c: log.records_after(c, ModelId("m"), 3)) == ()
        assert await store.call(lambda c: log.payload_of(c, RequestId("r"))) == b"batch"
        await store.close()

    asyncio.run(write())
    asyncio.run(read())


def test_small_calls_keep_their_place_among_others_and_last(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db'}"

    async def scenario() -> None:
        store = Store(url)
        await store.open()
        await store.call(lambda c: c.exec_driver_sql("CREATE TABLE seen (number INTEGER)"))

        def write(number: int) -> Callable[[sa.Connection], object]:
            return lambda c: c.exec_driver_sql(f"INSERT INTO seen VALUES ({number})")

        waiting = []
        for number in range(300):
            call = store.call if number % 3 else store.call_small
            waiting.append(asyncio.ensure_future(call(write(number))))
            if number % 7 == 0:
                await asyncio.gather(*waiting)
        await asyncio.gather(*waiting)
        for number in range(300, 600):  # nothing else is asked for: each at once
            await store.call_small(write(number))
        with pytest.raises(RuntimeError):
            await store.call_small(half_written)
        await store.close()
        again = Store(url)
        await again.open()
        rows = await again.call(lambda c: c.exec_driver_sql("SELECT number FROM seen").all())
        assert [row.number for row in rows] == list(range(600))
        await again.close()

    def half_written(connection: sa.Connection) -> None:
        connection.exec_driver_sql("INSERT INTO seen VALUES (-1)")
        raise RuntimeError("in the middle")

    asyncio.run(scenario())


def test_the_log_of_the_store_stays_short_however_much_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "db"
    monkeypatch.setattr(database, "_LOG_BYTES", 4 << 20)

    async def scenario() -> int:
        store = Store(f"sqlite:///{path}")
        await store.open()
        await store.call(lambda c: c.exec_driver_sql("CREATE TABLE kept (data BLOB)"))
        longest = 0
        for number in range(60):
            call = store.call if number % 2 else store.call_small
            await call(lambda c: c.exec_driver_sql("INSERT INTO kept VALUES (zeroblob(1000000))"))
            longest = max(longest, (tmp_path / "db-wal").stat().st_size)
        await store.close()
        return longest

    assert asyncio.run(scenario()) < 12_000_000
    with contextlib.closing(sqlite3.connect(path)) as again:
        assert again.execute("SELECT count(*) FROM kept").fetchone() == (60,)


def test_a_small_call_that_finds_the_database_locked_waits_beside_the_loop(tmp_path: Path) -> None:
    path = tmp_path / "db"

    async def scenario() -> None:
        store = Store(f"sqlite:///{path}")
        await store.open()
        await store.call(lambda c: c.exec_driver_sql("CREATE TABLE seen (number INTEGER)"))
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        asked = asyncio.ensure_future(
            store.call_small(lambda c: c.exec_driver_sql("INSERT INTO seen VALUES (1)"))
        )
        await asyncio.sleep(0)  # it has been tried, and the loop goes on
        assert not asked.done()
        other.execute("COMMIT")
        await asyncio.wait_for(asked, 60)
        assert other.execute("SELECT number FROM seen").fetchall() == [(1,)]
        other.close()
        await store.close()

    asyncio.run(scenario())


def test_a_transaction_that_fails_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = Store(f"sqlite:///{tmp_path / 'db'}")
        await store.open()

        def half(connection: sa.Connection) -> None:
            log.add_operation(connection, submission(1, OpKind.SAVE, b"", "r"))
            raise RuntimeError("in the middle")

        with pytest.raises(RuntimeError):
            await store.call(half)
        assert await store.call(lambda c: log.records_after(c, ModelId("m"), None)) == ()
        await store.close()

    asyncio.run(scenario())


def test_a_wrong_database_url_says_how_to_write_one() -> None:
    with pytest.raises(ConfigError, match="sqlite:///FILE"):
        Store("no url")


class Heard:
    """Notes what the hub says."""

    def __init__(self) -> None:
        self.joined: list[str] = []
        self.said: list[Frame] = []
        self.lost: list[str] = []
        self.join, self.loss = asyncio.Event(), asyncio.Event()

    def worker_joined(self, hello: messages.Hello) -> None:
        self.joined.append(hello.worker)
        self.join.set()

    def handle_frames(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        self.said += frames

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        self.lost.append(reason)
        self.loss.set()


HELLO = messages.Hello("w", "trainer")


async def talk(
    data: bytes = b"", then: bytes = b"", *, key: str | None = None, hello_timeout_s: float = 10.0
) -> tuple[Heard, messages.ToWorker]:
    """Send bytes to a hub, or join with a key; `then` more after its answer, and hang up."""
    heard = Heard()
    hub = WorkerHub(OneKey("secret"), hello_timeout_s=hello_timeout_s)
    await hub.start(heard)
    async with asyncio.timeout(60):
        if key is not None:
            _, writer, answer = await dial(hub, HELLO, key)
            if isinstance(answer, messages.Welcome):
                await heard.join.wait()
        else:
            reader, writer = await asyncio.open_connection(*hub.address)
            writer.write(data)
            answer = await next_message(reader)
        writer.write(then)
        writer.close()
        if isinstance(answer, messages.Welcome):
            await heard.loss.wait()
    await hub.close()
    return heard, answer


def test_a_worker_with_the_key_is_welcome_and_its_leaving_is_told_once() -> None:
    heard, answer = asyncio.run(talk(key="secret"))
    assert isinstance(answer, messages.Welcome)
    assert heard.joined == ["w"]
    assert heard.lost == ["it closed the connection"]


def test_a_worker_with_another_key_is_refused() -> None:
    heard, answer = asyncio.run(talk(key="guess"))
    assert isinstance(answer, messages.HelloRefused)
    assert "the key of 'w' is wrong" in answer.reason
    assert heard.joined == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (messages.encode(messages.Hello("w", "trainer", protocol=3)), "protocol 3"),
        (messages.encode(messages.ConnectRequest("w", bytes(32), protocol=99)), "protocol 99"),
        (messages.encode(messages.ConnectRequest("w", b"")), "nonce has 0 bytes"),
        (messages.encode(messages.ChallengeResponse(bytes(32))), "begin with a ConnectRequest"),
        (messages.encode(messages.Heartbeat()), "cannot be read"),
        (b"GET / HTTP/1.1\r\n\r\n", "begins with"),
    ],
)
def test_a_stranger_is_refused_with_the_reason(data: bytes, said: str) -> None:
    heard, refused = asyncio.run(talk(data))
    assert isinstance(refused, messages.HelloRefused)
    assert said in refused.reason
    assert heard.joined == []


def test_a_peer_that_says_nothing_is_not_waited_for() -> None:
    heard, answer = asyncio.run(talk(b"", hello_timeout_s=0.05))
    assert isinstance(answer, messages.HelloRefused)
    assert heard.joined == []


def test_a_worker_that_falls_silent_or_sends_garbage_is_lost() -> None:
    async def silent() -> list[str]:
        heard = Heard()
        hub = WorkerHub(OneKey("secret"), silent_after_s=0.05)
        await hub.start(heard)
        _, writer, _ = await dial(hub, HELLO, "secret")
        async with asyncio.timeout(60):
            await heard.loss.wait()
        writer.close()
        await hub.close()
        return heard.lost

    assert asyncio.run(silent()) == ["nothing was heard of it for 0.05 s"]
    heard, _ = asyncio.run(talk(then=b"garbage!", key="secret"))
    assert "begins with" in heard.lost[0]


def test_a_second_service_on_a_folder_is_told_about_the_first(tmp_path: Path) -> None:
    first, second = StateDirectory(tmp_path), StateDirectory(tmp_path)
    first.lock()
    first.write_server({"pid": 42, "url": "http://here"})
    with pytest.raises(RefusedError, match=rf"pid {os.getpid()}, http://here.*slackwater down"):
        second.lock()
    first.unlock()
    second.lock()
    assert not second.server_file.exists()
    second.unlock()


def test_keys_stay_the_same_and_are_for_the_owner_only(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    key = Tenants.open(state, ["a"]).key_of("a")
    again = Tenants.open(state, ["a", "b"])
    assert key.startswith("tml-")
    assert again.find_by_key(key) == "a"
    assert again.key_of("b") != key
    assert again.find_by_key("tml-guess") is None
    assert state.keys_file.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="--tenant"):
        Tenants.open(state, ["no spaces"])


def test_many_wait_for_one_future_and_an_outcome_can_be_read_again() -> None:
    async def scenario() -> None:
        board, request = FutureBoard(), RequestId("r")
        board.expect(request, TenantId("t"))
        assert not await board.wait(request, 0.01)
        waiting = [asyncio.create_task(board.wait(request, 60)) for _ in range(3)]
        await asyncio.sleep(0)
        outcome = RequestOutcome("sample", b"x")
        board.settle(request, outcome)
        assert await asyncio.gather(*waiting) == [True] * 3
        assert board.recent(request) == board.recent(request) == outcome

    asyncio.run(scenario())


def test_the_board_holds_so_many_outcomes_however_small_and_forgets_whose_they_were() -> None:
    board = FutureBoard()
    names = [RequestId(f"r{number}") for number in range(3000)]
    for name in names:
        board.expect(name, TenantId("t"))
        board.settle(name, RequestOutcome("optim_step", b""))
    kept = [name for name in names if board.recent(name) is not None]
    assert kept == names[-2000:]
    assert board.tenant_of(names[0]) is None and board.tenant_of(names[-1]) == "t"


def test_a_session_hears_of_each_finished_request_until_it_acknowledges() -> None:
    async def scenario() -> None:
        feed, session = FinishedRequestFeed(), SamplingSessionId("s")
        assert await feed.after(session, 0, 0.01) == ([], 0)
        waiting = asyncio.create_task(feed.after(session, 0, 60))
        await asyncio.sleep(0)
        done = FinishedRequest(RequestId("r1"), 5.0, 10)
        feed.add(session, done)
        found, cursor = await waiting
        assert found == [done]
        assert (await feed.after(session, 0, 0.01))[0] == [done]
        assert (await feed.after(session, cursor, 0.01))[0] == []
        feed.acknowledge(session, {RequestId("r1")})
        assert (await feed.after(session, 0, 0.01))[0] == []

    asyncio.run(scenario())


def test_default_seeds_repeat_with_their_counters_and_differ_between_them() -> None:
    seeds = {default_seed(f"m|{n}", seq, i) for n in range(3) for seq in range(5) for i in range(5)}
    assert len(seeds) == 75
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert default_seed("m|0", 1, 2) == default_seed("m|0", 1, 2)
    assert sample_seed(7, 0) == 7
    assert len({sample_seed(7, index) for index in range(50)}) == 50


def test_base_models_are_found_by_name_or_folder_and_bad_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 10, "max_position_embeddings": 20, "eos_token_id": 3})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    bases = BaseModels({"m": BaseModel.read("m", tmp_path)})
    assert bases.get("m") is bases.get(f"{tmp_path}/")
    assert bases.get("m").stop_token_ids == (3, 4)
    with pytest.raises(NotFoundError, match="there are: m"):
        bases.get("other")
    with pytest.raises(ConfigError, match=r"config\.json"):
        BaseModel.read("x", tmp_path / "nowhere")


def test_checkpoint_paths_are_what_the_sdk_accepts() -> None:
    path = checkpoint_path(ModelId("s:train:0"), "weights", "step-1")
    assert path == "tinker://s:train:0/weights/step-1"
    assert parse_path(path) == ("s:train:0", "weights", "step-1")
    for name in ("", "a/b", "..", "x" * 200, "a b"):
        with pytest.raises(ConfigError, match="path"):
            checkpoint_path(ModelId("m"), "weights", name)
    with pytest.raises(ConfigError, match="tinker://"):
        parse_path("/etc/passwd")


def test_a_controller_that_raises_stops_the_service_and_is_not_hidden() -> None:
    died: list[str] = []
    driver = live_driver(RolloutManager(), on_failure=lambda: died.append("died"))
    driver.feed(TimerFired(0.0, "rollout-watch"))
    assert not died
    nonsense: Any = ToldNothing(0.0)
    with pytest.raises(KeyError):
        driver.feed(nonsense)
    assert died == ["died"]


@dataclass(frozen=True)
class ToldNothing:
    """An event that the manager has no rule for."""

    now_s: float


def test_trainers_compute_in_bf16_on_cuda_and_in_fp32_on_a_cpu_unless_told(tmp_path: Path) -> None:
    def dtype(device: str, told: str | None = None) -> str:
        settings = ServiceSettings(state=tmp_path, models={}, device=device, train_dtype=told)
        return settings.trainer_dtype

    assert (dtype("cpu"), dtype("cuda:1")) == ("float32", "bfloat16")
    assert (dtype("cpu", "bfloat16"), dtype("cuda", "float32")) == ("bfloat16", "float32")
    with pytest.raises(ConfigError, match="--train-dtype: 'fp8' must be one of float32, bfloat16"):
        dtype("cuda", "fp8")
