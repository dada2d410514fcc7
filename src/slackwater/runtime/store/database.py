"""The durable store: one thread, one connection, one transaction per call, in order.

SQLite in WAL mode by default (a commit survives the death of this process), PostgreSQL by URL. A
plain `sqlite3` connection on its own thread commits several times faster than an async driver.

If the database goes away or the disk is full, the call is tried again and later ones wait. After
`patience_s` the store is lost and the service stops; the next start recovers all it had answered.

Small urgent writes (`call_small`) run on the event loop's thread while the store is idle: handing
them to the thread and back takes several times as long as SQLite's write to the page cache.
"""

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)

from slackwater.model.errors import ConfigError, RefusedError, UnavailableError
from slackwater.runtime.store.schema import metadata

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 30.0
RETRY_S = 0.25
_BUSY_MS = 10_000
_LOG_BYTES = 64 << 20
_LOG_WRITES = 3000
_SMALL_BYTES = 16 << 10
_SMALL_BATCH_BYTES = 64 << 10  # a larger batch is written on the store's thread

_STEPS = Path(__file__).parent / "migrations"
_FIRST = "0001"  # databases of version 0.1.0 carry no number; they have its tables
_KNOWN = {file.stem[1:5] for file in (_STEPS / "versions").glob("v*.py")}
_version = sa.Table(  # as Alembic makes it
    "alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True)
)


def bring_up_to_date(connection: Connection) -> None:
    """Make the newest tables in an empty database, or take every step that an older one lacks, in
    the caller's transaction.
    """
    tables = sa.inspect(connection)
    found: str | None = None
    if tables.has_table(_version.name):
        found = connection.execute(sa.select(_version)).scalar()
    if found is None and not tables.has_table("operations"):
        metadata.create_all(connection)
        _version.create(connection, checkfirst=True)
        connection.execute(_version.insert().values(version_num=max(_KNOWN)))
        return
    if found is not None and found not in _KNOWN:
        raise RefusedError(
            f"database: its tables are of step {found}, and this version knows steps up to "
            f"{max(_KNOWN)}; it was used by a newer Slackwater: start that one, or give another "
            "--state"
        )
    if found != max(_KNOWN):
        _take_steps(connection, stamped=found is not None)


def _take_steps(connection: Connection, stamped: bool) -> None:
    # Late: Alembic takes a tenth of a start to import, and few starts upgrade anything.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_STEPS))
    config.attributes["connection"] = connection
    if not stamped:
        command.stamp(config, _FIRST)
    command.upgrade(config, "head")


class Row(msgspec.Struct, frozen=True):
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


class StoreLostError(UnavailableError):
    """The database cannot be used any more; the service must restart."""


class Store:
    """Runs functions of a connection on the store's thread; calls `lost` when it gives up."""

    def __init__(
        self, url: str, lost: Callable[[], None] = lambda: None, patience_s: float = PATIENCE_S
    ) -> None:
        try:
            self._url = make_url(url)
            known = self._url.get_backend_name() in ("sqlite", "postgresql")
        except ArgumentError:
            known = False
        if not known:
            fix = "must be a URL such as sqlite:///FILE or postgresql://..."
            raise ConfigError.of("--database", url, fix)
        if self._url.drivername == "postgresql":
            self._url = self._url.set(drivername="postgresql+psycopg")
        self._is_local = self._url.get_backend_name() == "sqlite"
        # One thread at a time, but not always the same.
        arguments = {"check_same_thread": False} if self._is_local else {}
        self._engine = sa.create_engine(
            self._url, poolclass=sa.pool.NullPool, connect_args=arguments
        )
        if self._is_local:
            sa.event.listen(self._engine, "connect", _tune_sqlite)
        self._thread = _StoreThread("store")
        self._connection: Connection | None = None
        self._busy_ms = _BUSY_MS  # how long the connection waits for a lock
        self._patience_s = patience_s
        self._announce_loss = lost
        self._closing = threading.Event()
        self._is_lost = False
        self._writes = 0  # since the log was last brought into the database
        self._checkpointing: asyncio.Future[None] | None = None

    async def open(self) -> None:
        await self._thread.run(self._open)

    def _open(self) -> None:
        try:
            self._connection = self._engine.connect()
            bring_up_to_date(self._connection)
            self._connection.commit()
        except SQLAlchemyError as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            why = " ".join(str(cause).split())
            if type(cause) is sqlite3.DatabaseError:  # what SQLite raises for a damaged file
                why += "; put a copy of the file there, or give another --state"
            raise UnavailableError(f"database {self._shown} cannot be opened: {why}") from None

    @property
    def _shown(self) -> str:
        return self._url.render_as_string(hide_password=True)

    async def call(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction, perhaps more than once; durable when this returns."""
        try:
            result = await self._thread.run(lambda: self._run(work))
        except StoreLostError:
            self._announce_loss()
            raise
        self._checkpoint_if_long()
        if self._checkpointing is not None and self._log_bytes() > 2 * _LOG_BYTES:
            await self._checkpointing  # writes are faster than the disk
        return result

    async def call_small(self, work: Callable[[Connection], T]) -> T:
        """As `call`, for a few rows: immediately if the store is idle, and always in order."""
        found: list[T] = []
        if self.try_now(lambda connection: found.append(work(connection))):
            return found[-1]
        return await self.call(work)

    async def call_sized(self, size_bytes: int, work: Callable[[Connection], T]) -> T:
        """As `call_small` if that is little, as `call` otherwise."""
        return await (self.call_small if size_bytes <= _SMALL_BYTES else self.call)(work)

    def try_now(self, work: Callable[[Connection], None]) -> bool:
        """Write a few rows now; False if nothing was written because the store is busy."""
        if not self._is_local or self._connection is None or not self._thread.is_idle:
            return False
        try:
            self._attempt(work, busy_ms=0)  # nor wait for another process's lock
        except (OperationalError, InterfaceError):
            return False
        self._checkpoint_if_long(small=True)
        return True

    async def write(self, writes: Sequence[Write]) -> None:
        """Write all in one transaction; rows that are known already, as their `if_known` says."""
        try:
            await self.call(lambda connection: _write_all(connection, writes))
        except IntegrityError:
            checked = [(isinstance(one, Row) and one.if_known) or one for one in writes]
            await self.call(lambda connection: _write_all(connection, checked))

    def try_write_now(self, writes: Sequence[Write]) -> bool:
        """As `write`, but now; False if nothing was written: the store is busy, a row is known, or
        it is too much to do here.
        """
        rows = [one for one in writes if isinstance(one, Row)]
        if sum(row.size_bytes for row in rows) > _SMALL_BATCH_BYTES:
            return False
        if len(rows) == len(writes):
            return self._try_rows_now(rows)
        try:
            return self.try_now(lambda connection: _write_all(connection, writes))
        except IntegrityError:
            return False

    def _try_rows_now(self, rows: Sequence[Row]) -> bool:
        """By the driver alone: what SQLAlchemy does around a statement takes longer than SQLite."""
        if not self._is_local or self._connection is None or not self._thread.is_idle:
            return False
        driver = self._driver(self._connection, busy_ms=0)
        try:
            with driver:
                for row in rows:
                    driver.execute(row.sql, row.values)
        except sqlite3.Error:
            return False
        self._checkpoint_if_long(small=True)
        return True

    def _driver(self, connection: Connection, busy_ms: int) -> Any:
        """What SQLite's connection is, for which a lock of another process is worth this wait."""
        driver: Any = connection.connection.driver_connection
        if self._busy_ms != busy_ms:
            driver.execute(f"PRAGMA busy_timeout={busy_ms}")
            self._busy_ms = busy_ms
        return driver

    def _checkpoint_if_long(self, *, small: bool = False) -> None:
        """Checkpoint a long log beside the writes that go on, since that waits for the disk; many
        `small` writes make it long, never one.
        """
        if not self._is_local or (
            self._checkpointing is not None and not self._checkpointing.done()
        ):
            return
        self._writes += 1
        if self._writes > _LOG_WRITES or (not small and self._log_bytes() > _LOG_BYTES):
            self._writes = 0
            loop = asyncio.get_running_loop()
            self._checkpointing = loop.run_in_executor(None, self._checkpoint)

    def _log_bytes(self) -> int:
        try:
            return Path(f"{self._url.database}-wal").stat().st_size
        except FileNotFoundError:
            return 0

    def _checkpoint(self) -> None:
        """Most of the log while others write; then, with the write lock, what has come meanwhile.
        The first write after it waits for the disk too, so an empty one is made here.
        """
        with contextlib.suppress(DBAPIError), self._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(RESTART)")
            connection.exec_driver_sql("PRAGMA user_version = 0")
            connection.commit()

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

    def _attempt(self, work: Callable[[Connection], T], busy_ms: int = _BUSY_MS) -> T:
        if self._connection is None:
            self._connection, self._busy_ms = self._engine.connect(), _BUSY_MS
        if self._is_local:
            self._driver(self._connection, busy_ms)
        is_committing = False
        try:
            with self._connection.begin():
                result = work(self._connection)
                is_committing = True
        except DBAPIError as error:
            if is_committing and error.connection_invalidated:
                # It may have been committed: a retry could do it twice.
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
        """Finish earlier calls, and disconnect."""
        self._closing.set()
        if self._checkpointing is not None:
            await self._checkpointing
        await self._thread.run(self._drop_connection)
        self._thread.end()

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _write_all(connection: Connection, writes: Sequence[Write]) -> None:
    for sql, some in groupby(writes, lambda one: one.sql if isinstance(one, Row) else None):
        if sql is None:
            for write in some:
                assert not isinstance(write, Row)
                write(connection)
        else:
            connection.execute(sa.text(sql), [row.values for row in some if isinstance(row, Row)])


class _StoreThread:
    """Calls for one thread, in order; cheaper than an executor, since every request waits here."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[
            tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop] | None
        ] = queue.SimpleQueue()
        self._unsettled = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether everything was done and reported; for the event loop's thread."""
        return self._unsettled == 0

    def run(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """What the work returns or raises; a call that nobody awaits is skipped if not begun."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[T] = loop.create_future()
        self._unsettled += 1
        self._calls.put((work, found, loop))
        return found

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            work, found, loop = call
            try:
                tell = partial(self._settle, found, None if found.cancelled() else work(), None)
            except BaseException as error:  # noqa: BLE001  (whoever waits gets it)
                tell = partial(self._settle, found, None, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(tell)
            del call, work, found, loop, tell

    def _settle(
        self, found: "asyncio.Future[Any]", result: Any, error: BaseException | None
    ) -> None:
        self._unsettled -= 1
        if found.cancelled():
            return
        if error is None:
            found.set_result(result)
        else:
            found.set_exception(error)


def _tune_sqlite(connection: Any, _: Any) -> None:
    connection.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint=0")  # the store does it itself, out of the way
    # It is written again from its beginning: to cut it off takes tens of milliseconds.
    connection.execute(f"PRAGMA journal_size_limit={_LOG_BYTES // 2}")
