"""What must be in the log before anybody hears of it: written together, told in order, never told
before.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from slackwater.runtime.net.background import Background
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.outcomes import WriteAhead

TOLD_WITHIN_S = 60.0


def write(number: int) -> Callable[[sa.Connection], None]:
    def insert(connection: sa.Connection) -> None:
        connection.exec_driver_sql(f"INSERT INTO seen VALUES ({number})")

    return insert


async def opened(path: Path) -> Store:
    store = Store(f"sqlite:///{path}")
    await store.open()
    await store.call(lambda c: c.exec_driver_sql("CREATE TABLE seen (number INTEGER)"))
    return store


def test_what_is_told_is_in_the_log_and_everything_is_told_in_order(tmp_path: Path) -> None:
    path, told = tmp_path / "db", list[tuple[int, int]]()

    async def scenario() -> None:
        store = await opened(path)
        ahead = WriteAhead(store, Background(lambda error: None))
        reader = sqlite3.connect(path)
        done = asyncio.Event()

        def tell(number: int) -> None:
            (written,) = reader.execute("SELECT COUNT(*) FROM seen").fetchone()
            told.append((number, written))
            if number == 59:
                done.set()

        for number in range(60):
            # Every third has nothing to write; every seventh turn finds the store at work.
            ahead.then(partial(tell, number), write(number) if number % 3 else None)
            if number % 7 == 0:
                busy = asyncio.ensure_future(store.call(lambda c: None))
                await asyncio.sleep(0)
                await busy
        await asyncio.wait_for(done.wait(), TOLD_WITHIN_S)
        reader.close()
        await store.close()

    asyncio.run(scenario())
    assert [number for number, _ in told] == list(range(60))
    assert all(written >= sum(1 for n in range(number + 1) if n % 3) for number, written in told)


def test_what_is_asked_for_in_one_turn_is_one_transaction(tmp_path: Path) -> None:
    path, versions = tmp_path / "db", list[int]()

    async def scenario() -> None:
        store = await opened(path)
        ahead = WriteAhead(store, Background(lambda error: None))
        reader = sqlite3.connect(path)
        done = asyncio.Event()

        def tell(last: bool) -> None:
            versions.append(reader.execute("SELECT COUNT(*) FROM seen").fetchone()[0])
            if last:
                done.set()

        for number in range(5):
            ahead.then(partial(tell, number == 4), write(number))
        assert versions == []  # nobody hears before the turn is over
        await asyncio.wait_for(done.wait(), TOLD_WITHIN_S)
        reader.close()
        await store.close()

    asyncio.run(scenario())
    assert versions == [5] * 5


def test_a_write_that_fails_is_told_to_nobody_and_takes_the_service_down(tmp_path: Path) -> None:
    told, failures = list[int](), list[BaseException]()

    async def scenario() -> None:
        store = await opened(tmp_path / "db")
        failed = asyncio.Event()

        def fail(error: BaseException) -> None:
            failures.append(error)
            failed.set()

        ahead = WriteAhead(store, Background(fail))

        def broken(connection: sa.Connection) -> None:
            raise KeyError("not there")

        ahead.then(partial(told.append, 1), write(1))
        ahead.then(partial(told.append, 2), broken)
        await asyncio.wait_for(failed.wait(), TOLD_WITHIN_S)
        rows = await store.call(lambda c: c.exec_driver_sql("SELECT * FROM seen").all())
        assert rows == []
        await store.close()

    asyncio.run(scenario())
    assert told == []
    assert [type(error) for error in failures] == [KeyError]
