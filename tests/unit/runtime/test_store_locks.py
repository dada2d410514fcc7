"""Another process has the database locked: small writes do not wait for it, all others do."""

import asyncio
import logging
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy.engine import Connection

from slackwater.runtime.store.database import Row, Store

_HELD_S = 0.05


def test_a_call_waits_for_a_lock_that_a_small_write_did_not_wait_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(connection: Connection) -> None:
        connection.exec_driver_sql("INSERT INTO numbers VALUES (1)")

    async def scenario() -> int:
        store = Store(f"sqlite:///{tmp_path / 'db'}")
        await store.open()
        await store.call(lambda c: c.exec_driver_sql("CREATE TABLE numbers (number INTEGER)"))
        assert store.try_now(write)
        other = sqlite3.connect(tmp_path / "db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert not store.try_now(write)
        asyncio.get_running_loop().call_later(_HELD_S, other.execute, "ROLLBACK")
        async with asyncio.timeout(60):
            await store.call(write)
        found = other.execute("SELECT COUNT(*) FROM numbers").fetchone()[0]
        other.close()
        await store.close()
        return int(found)

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(scenario()) == 2
    assert "trying again" not in caplog.text


def test_rows_of_which_one_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    sql = "INSERT INTO numbers VALUES (:number)"

    async def scenario() -> list[int]:
        store = Store(f"sqlite:///{tmp_path / 'db'}")
        await store.open()
        made = "CREATE TABLE numbers (number INTEGER PRIMARY KEY)"
        await store.call(lambda c: c.exec_driver_sql(made))
        assert store.try_write_now([Row(sql, {"number": 1}), Row(sql, {"number": 2})])
        assert not store.try_write_now([Row(sql, {"number": 3}), Row(sql, {"number": 1})])
        other = sqlite3.connect(tmp_path / "db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert not store.try_write_now([Row(sql, {"number": 4})])
        other.execute("ROLLBACK")
        found = [number for (number,) in other.execute("SELECT number FROM numbers ORDER BY 1")]
        other.close()
        await store.close()
        return found

    assert asyncio.run(scenario()) == [1, 2]
