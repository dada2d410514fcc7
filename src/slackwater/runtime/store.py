"""The durable store: one thread, one connection, one transaction per call, in the order of the calls.

SQLite in WAL mode by default (a commit survives the death of this process at any moment), PostgreSQL by
URL. A plain `sqlite3` connection on its own thread commits several times faster than an async driver.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.runtime.schema import metadata

T = TypeVar("T")


class Store:
    """Runs functions of a connection on the store's thread."""

    def __init__(self, url: str) -> None:
        try:
            self._url = make_url(url)
        except ArgumentError:
            raise ConfigError.of(
                "--database", url, "must be a URL such as sqlite:///FILE or postgresql://..."
            ) from None
        if self._url.drivername == "postgresql":
            self._url = self._url.set(drivername="postgresql+psycopg")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._connection: Connection | None = None

    async def open(self) -> None:
        """Connect, and make the tables that are missing."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._open)

    def _open(self) -> None:
        engine = sa.create_engine(self._url, poolclass=sa.pool.StaticPool)
        if self._url.get_backend_name() == "sqlite":
            sa.event.listen(engine, "connect", _tune_sqlite)
        try:
            self._connection = engine.connect()
            metadata.create_all(self._connection)
            self._connection.commit()
        except SQLAlchemyError as error:
            shown = self._url.render_as_string(hide_password=True)
            raise UnavailableError(f"database {shown} cannot be opened: {error}") from None

    async def call(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction; it is durable when this returns."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    def _run(self, work: Callable[[Connection], T]) -> T:
        assert self._connection is not None, "the store is not open"
        with self._connection.begin():
            return work(self._connection)

    async def close(self) -> None:
        """Finish what was asked before, and disconnect."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection.engine.dispose()
            self._connection = None


def _tune_sqlite(connection: Any, _: Any) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")
