"""The durable store: one thread, one connection, one transaction per call, in the order of the calls.

SQLite in WAL mode by default (a commit survives the death of this process at any moment), PostgreSQL by
URL. A plain `sqlite3` connection on its own thread commits several times faster than an async driver.

A database that goes away, or a disk that is full, is waited for: the call is tried again, those behind it
wait their turn. After `patience_s` the store is lost and the service has to stop; nothing that it answered
before is lost with it, and the next start goes on from there.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.runtime.store.upgrading import bring_up_to_date

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 30.0
RETRY_S = 0.25


class StoreLostError(UnavailableError):
    """The database cannot be used any more; only a new start can go on."""


class Store:
    """Runs functions of a connection on the store's thread; `lost` is called when it has given up."""

    def __init__(
        self, url: str, lost: Callable[[], None] = lambda: None, patience_s: float = PATIENCE_S
    ) -> None:
        try:
            self._url = make_url(url)
        except ArgumentError:
            raise ConfigError.of(
                "--database", url, "must be a URL such as sqlite:///FILE or postgresql://..."
            ) from None
        if self._url.drivername == "postgresql":
            self._url = self._url.set(drivername="postgresql+psycopg")
        self._engine = sa.create_engine(self._url, poolclass=sa.pool.NullPool)
        if self._url.get_backend_name() == "sqlite":
            sa.event.listen(self._engine, "connect", _tune_sqlite)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._connection: Connection | None = None
        self._patience_s = patience_s
        self._announce_loss = lost
        self._closing = threading.Event()
        self._is_lost = False

    async def open(self) -> None:
        """Connect, and bring the tables up to date."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._open)

    def _open(self) -> None:
        try:
            self._connection = self._engine.connect()
            bring_up_to_date(self._connection)
            self._connection.commit()
        except SQLAlchemyError as error:
            raise UnavailableError(f"database {self._shown} cannot be opened: {error}") from None

    @property
    def _shown(self) -> str:
        return self._url.render_as_string(hide_password=True)

    async def call(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction; it is durable when this returns. It may be run more than once."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)
        except StoreLostError:
            self._announce_loss()
            raise

    def _run(self, work: Callable[[Connection], T]) -> T:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            if self._is_lost:
                raise StoreLostError(f"database {self._shown} was lost")
            try:
                return self._attempt(work)
            except (OperationalError, InterfaceError) as error:
                self._drop_connection()
                if time.monotonic() > deadline_s or self._closing.wait(RETRY_S):
                    raise self._loss(str(error.orig)) from None
                logger.warning("database %s: %s; trying again", self._shown, error.orig)

    def _attempt(self, work: Callable[[Connection], T]) -> T:
        if self._connection is None:
            self._connection = self._engine.connect()
        is_committing = False
        try:
            with self._connection.begin():
                result = work(self._connection)
                is_committing = True
        except DBAPIError as error:
            if is_committing and error.connection_invalidated:
                # It may have been committed or not: trying again could do it twice.
                raise self._loss(f"the connection broke in a commit ({error.orig})") from None
            raise
        return result

    def _loss(self, reason: str) -> StoreLostError:
        self._is_lost = True
        logger.error("database %s is lost: %s", self._shown, reason)
        return StoreLostError(
            f"database {self._shown} is lost: {reason}; make it work and start the service again"
        )

    async def close(self) -> None:
        """Finish what was asked before, and disconnect."""
        self._closing.set()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._drop_connection)
        self._thread.shutdown()

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _tune_sqlite(connection: Any, _: Any) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")
