"""Writes to the durable log before the callbacks that depend on it run.

Writes of one round of the event loop are one transaction: an action that ends and the one that
takes its cores wait for a single write. Then the callbacks run in order.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from slackwater.runtime.net.background import Background
from slackwater.runtime.store.database import Store


@dataclass(frozen=True, slots=True)
class Row:
    """The values of one row, and the SQL that writes it, with names (`:name`) for them; neighbours
    are written at once.

    Where that clashes with a row of the database, all is written once more, this one as `if_known`
    says.
    """

    sql: str
    values: Mapping[str, Any]
    size_bytes: int = 0
    if_known: Callable[[Connection], None] | None = None


Write: TypeAlias = Callable[[Connection], None] | Row
Tell: TypeAlias = Callable[[], None]

_SMALL_BYTES = 64 << 10  # a larger batch is written on the store's thread


class WriteAhead:
    """A queue of writes, each with the callback that runs after it."""

    def __init__(self, store: Store, background: Background) -> None:
        self._store = store
        self._background = background
        self._queue: list[tuple[Write | None, Tell]] = []
        self._under_way = False

    def then(self, tell: Tell, write: Write | None = None) -> None:
        """Write, then call `tell`; without a write, call it now unless others are queued."""
        if write is None and not self._under_way:
            tell()
            return
        self._queue.append((write, tell))
        if not self._under_way:
            self._under_way = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Write here if the store is idle, as it usually is; else on its thread."""
        batch, self._queue = self._queue, []
        try:
            if self._try_write_now(batch):
                self._run_callbacks(batch)
            else:
                self._background.spawn(self._wait(batch))
        except IntegrityError:
            self._background.spawn(self._wait(batch))
        except Exception as error:  # noqa: BLE001  (it takes the service down, as that of a task does)
            self._background.spawn(_raise(error))

    def _try_write_now(self, batch: Sequence[tuple[Write | None, Tell]]) -> bool:
        writes = [write for write, _ in batch if write is not None]
        rows = [write for write in writes if isinstance(write, Row)]
        if sum(row.size_bytes for row in rows) > _SMALL_BYTES:
            return False
        if len(rows) == len(writes):
            return self._store.try_rows_now([(row.sql, row.values) for row in rows])
        return self._store.try_now(lambda connection: _write_all(connection, batch))

    async def _wait(self, batch: Sequence[tuple[Write | None, Tell]]) -> None:
        try:
            await self._store.call(lambda connection: _write_all(connection, batch))
        except IntegrityError:
            checked = [(_use_if_known(write), tell) for write, tell in batch]
            await self._store.call(lambda connection: _write_all(connection, checked))
        self._run_callbacks(batch)

    def _run_callbacks(self, batch: Sequence[tuple[Write | None, Tell]]) -> None:
        for _, tell in batch:
            tell()
        self._under_way = bool(self._queue)
        if self._queue:
            asyncio.get_running_loop().call_soon(self._begin)


def _write_all(connection: Connection, batch: Sequence[tuple[Write | None, Tell]]) -> None:
    for sql, writes in groupby((write for write, _ in batch if write), _sql):
        if sql is None:
            for write in writes:
                assert not isinstance(write, Row)
                write(connection)
        else:
            connection.execute(sa.text(sql), [row.values for row in writes if isinstance(row, Row)])


def _use_if_known(write: Write | None) -> Write | None:
    return (write.if_known or write) if isinstance(write, Row) else write


def _sql(write: Write) -> str | None:
    return write.sql if isinstance(write, Row) else None


async def _raise(error: Exception) -> None:
    raise error
