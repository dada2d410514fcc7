"""The durable store on PostgreSQL: the same functions, the same answers."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from harness.ports import free_port
from harness.postgres_cluster import PostgresCluster, can_run_postgres
from slackwater.model.ids import ModelId, RequestId, SamplingSessionId, SessionId, TenantId
from slackwater.model.operation import Operation, OpKind, OpStatus
from slackwater.model.session import LoraShape, SamplingSession, TrainedModel
from slackwater.runtime.services import sampling
from slackwater.runtime.services.sessions import Sessions
from slackwater.runtime.store import checkpoints as shelf
from slackwater.runtime.store import operation_log, sampling_sessions
from slackwater.runtime.store.database import Store, StoreLostError
from slackwater.runtime.store.outcomes import RequestOutcome

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not can_run_postgres(), reason="PostgreSQL is not installed"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    made = PostgresCluster(free_port())
    made.start()
    yield made
    made.remove()


TENANT, MODEL = TenantId("t"), ModelId("s:train:0")


def fill(connection: Connection) -> None:
    """One of everything."""
    model = TrainedModel(MODEL, SessionId("s"), TENANT, 0, "tiny", LoraShape(4), 2**62, 1.0)
    operation_log.add_model(connection, model, {"a": 1})
    operation_log.add_model(connection, model, {"a": 1})
    for seq, kind in enumerate((OpKind.CREATE, OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP)):
        operation = Operation(RequestId(f"op-{seq}"), MODEL, seq, kind)
        new = operation_log.Submission(operation, TENANT, bytes([seq, 0, 255]), 1.0)
        assert operation_log.add_operation(connection, new) == (f"op-{seq}", True)
        assert operation_log.add_operation(connection, new) == (f"op-{seq}", False)
    done = RequestOutcome("create_model", b"\0\xff")
    operation_log.finish_operation(connection, RequestId("op-0"), done, 2.0)
    session = SamplingSession(
        SamplingSessionId("ss"), TENANT, SessionId("s"), "tiny", "v", "tiny|client 0"
    )
    sampling_sessions.add_sampling_session(connection, session, 0, 1.0)
    for name, seq in (("sm-1", 2**60), ("sm-2", 1)):
        row = sampling.new_row(RequestId(name), session, seq, b"ask", 1.0)
        connection.execute(sa.text(row.sql), row.values)
    answer = RequestOutcome("sample", b"tokens")
    row = sampling.finish_row(RequestId("sm-2"), answer, 3.0)
    connection.execute(sa.text(row.sql), row.values)
    for name in ("a", "b", "a"):
        path = shelf.checkpoint_path(MODEL, shelf.STATE, name)
        held = shelf.Checkpoint(
            *(path, TENANT, MODEL, shelf.STATE, name, "tiny", LoraShape(4), f"/{name}", "l"),
            *(2**40, 1.0, None, False, {"note": name}),
        )
        shelf.put_checkpoint(connection, held)


def check(connection: Connection) -> None:
    """It is all there, and no more."""
    records = operation_log.records_after(connection, MODEL, None)
    assert [record.status for record in records] == [
        OpStatus.DONE,
        OpStatus.WAITING,
        OpStatus.WAITING,
    ]
    assert operation_log.payload_of(connection, RequestId("op-2")) == b"\2\0\xff"
    operation_log.forget_replayed(connection, MODEL, 0)
    assert len(operation_log.records_after(connection, MODEL, 0)) == 2
    assert sampling.read_waiting(connection) == [("sm-1", "ss", b"ask")]
    ((session, finished),) = sampling.read_finished(connection)
    assert (session, finished.request, finished.size_bytes) == ("ss", "sm-2", 6)
    assert sampling_sessions.count_of_lineage(connection, SessionId("s"), "tiny|") == 1
    assert sampling_sessions.join_session(connection, SamplingSessionId("ss")) == 1
    held = shelf.list_checkpoints(connection, TENANT, 2.0, MODEL)
    assert sorted(checkpoint.name for checkpoint in held) == ["a", "b"]
    assert held[0].size_bytes == 2**40
    operation_log.drop_orphans(connection, 10.0)
    sampling_sessions.drop_orphans(connection, 10.0)
    assert len(operation_log.records_after(connection, MODEL, None)) == 3


def test_everything_the_service_keeps_survives_on_postgresql(cluster: PostgresCluster) -> None:
    async def scenario() -> None:
        for step in (fill, check):
            store = Store(cluster.url)
            await store.open()
            await store.call(step)
            sessions = Sessions(store, 300.0)
            opened = await sessions.open(TENANT, {"tags": [], "user_metadata": None}, 0.0)
            await sessions.end(opened, {"type": "cancelled"})
            assert (await sessions.describe(TENANT))[0]["status"] == {"type": "cancelled"}
            await store.close()

    asyncio.run(scenario())


def add_session(name: str) -> Callable[[Connection], None]:
    def add(connection: Connection) -> None:
        session = SamplingSession(
            SamplingSessionId(name), TENANT, SessionId("s"), "tiny", "v", "tiny|client 0"
        )
        sampling_sessions.add_sampling_session(connection, session, 0, 1.0)

    return add


def test_calls_made_while_the_database_restarts_are_done_when_it_is_back(
    cluster: PostgresCluster,
) -> None:
    async def scenario() -> None:
        store = Store(cluster.url)
        await store.open()
        cluster.stop()
        calls = [asyncio.create_task(store.call(add_session(f"ss-{n}"))) for n in range(3)]
        await asyncio.to_thread(cluster.start)
        await asyncio.wait_for(asyncio.gather(*calls), 120)
        for number in range(3):
            joined = SamplingSessionId(f"ss-{number}")
            assert (
                await store.call(partial(sampling_sessions.join_session, sampling_session=joined))
                == 1
            )
        await store.close()

    asyncio.run(scenario())


def test_a_database_that_stays_away_is_given_up_once_and_loudly(cluster: PostgresCluster) -> None:
    async def scenario() -> None:
        losses: list[str] = []
        store = Store(cluster.url, lambda: losses.append("lost"), patience_s=1.0)
        await store.open()
        cluster.stop()
        with pytest.raises(StoreLostError, match="start the service again"):
            await store.call(add_session("never"))
        assert losses
        await store.close()

    try:
        asyncio.run(scenario())
    finally:
        cluster.start()
