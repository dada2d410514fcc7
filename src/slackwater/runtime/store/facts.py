"""Facts: values that the durable store keeps as JSON under a name."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from slackwater.runtime.net.background import Background
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.schema import facts

T = TypeVar("T")


def put_fact(connection: Connection, name: str, value: object) -> None:
    text = msgspec.json.encode(value).decode()
    changed = connection.execute(facts.update().where(facts.c.name == name).values(value=text))
    if not changed.rowcount:
        connection.execute(facts.insert().values(name=name, value=text))


def find_fact(connection: Connection, name: str, kind: type[T]) -> T | None:
    text = connection.execute(sa.select(facts.c.value).where(facts.c.name == name)).scalar()
    return None if text is None else msgspec.json.decode(text, type=kind)


def facts_under(connection: Connection, prefix: str, kind: type[T]) -> list[T]:
    """All values whose names have this prefix, in the order of their names."""
    named = sa.select(facts.c.value).where(facts.c.name.startswith(prefix)).order_by(facts.c.name)
    return [msgspec.json.decode(text, type=kind) for text in connection.execute(named).scalars()]


class SavedFact:
    """A fact that follows what `current` returns; all changes of one round of the event loop are
    one write.
    """

    def __init__(
        self, store: Store, background: Background, name: str, current: Callable[[], object]
    ) -> None:
        self._store, self._background = store, background
        self._name, self._current = name, current
        self._due = False
        self._saved: asyncio.Future[None] | None = None  # by the last write that was planned

    def save_soon(self) -> None:
        """Save the value as it is at the end of this round."""
        if not self._due:
            self._due = True
            self._saved = asyncio.get_running_loop().create_future()
            self._background.spawn(self._save(self._saved))

    async def _save(self, saved: asyncio.Future[None]) -> None:
        self._due = False
        try:
            await self._store.call(partial(put_fact, name=self._name, value=self._current()))
        finally:
            saved.set_result(None)

    async def wait_until_saved(self) -> None:
        """Wait until every change so far is durable."""
        if self._saved is not None:
            await asyncio.shield(self._saved)

    async def read(self, kind: type[T]) -> T | None:
        return await self._store.call(partial(find_fact, name=self._name, kind=kind))
