"""Named values that survive a restart, as JSON."""

from typing import TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from slackwater.runtime.store.schema import facts

T = TypeVar("T")


def put_fact(connection: Connection, name: str, value: object) -> None:
    """Replaces the value of that name."""
    text = msgspec.json.encode(value).decode()
    changed = connection.execute(facts.update().where(facts.c.name == name).values(value=text))
    if not changed.rowcount:
        connection.execute(facts.insert().values(name=name, value=text))


def find_fact(connection: Connection, name: str, kind: type[T]) -> T | None:
    """The value of that name, if there is one."""
    text = connection.execute(sa.select(facts.c.value).where(facts.c.name == name)).scalar()
    return None if text is None else msgspec.json.decode(text, type=kind)


def facts_under(connection: Connection, prefix: str, kind: type[T]) -> list[T]:
    """All values whose names begin so, in the order of their names."""
    named = sa.select(facts.c.value).where(facts.c.name.startswith(prefix)).order_by(facts.c.name)
    return [msgspec.json.decode(text, type=kind) for text in connection.execute(named).scalars()]
