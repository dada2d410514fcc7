"""Jobs' accounts, durable: written down now and then, and taken over by the next start."""

from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from slackwater.control.jobs.events import JobAdopted
from slackwater.control.jobs.registry import RegisteredJob
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job_life import JobAccount, JobStage
from slackwater.runtime.store.schema import facts

_NAME = "job_accounts"

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


class SavedAccount(msgspec.Struct, frozen=True):
    """One job's row; those of version 0.1 have no more than the first three fields."""

    job: JobId
    tenant: TenantId
    account: JobAccount
    over: JobStage | None = None
    reason: str = ""
    iterations_done: int = 0
    crashes: int = 0


def save_accounts(connection: Connection, entries: list[RegisteredJob]) -> None:
    """All of them, in one row."""
    held = [
        SavedAccount(
            e.job,
            e.tenant,
            e.account,
            e.stage if e.stage.over else None,
            e.reason,
            e.iterations_done,
            e.crashes,
        )
        for e in entries
    ]
    put_fact(connection, _NAME, held)


def saved_accounts(connection: Connection, now_s: float) -> list[JobAdopted]:
    """As events for the job registry."""
    return [
        JobAdopted(
            now_s,
            row.job,
            row.tenant,
            row.account,
            row.over or JobStage.STOPPED,
            row.reason,
            row.iterations_done,
            row.crashes,
        )
        for row in find_fact(connection, _NAME, list[SavedAccount]) or ()
    ]


def shown(entry: RegisteredJob, now_s: float) -> dict[str, Any]:
    """A job as `slackwater job list` and the HTTP face show it."""
    account = asdict(entry.account)
    return {
        "job": entry.job,
        "tenant": entry.tenant,
        "stage": entry.stage.value,
        "reason": entry.reason,
        "age_s": round(now_s - entry.since_s, 1),
        "iterations_done": entry.iterations_done,
        "crashes": entry.crashes,
        "device_s": entry.account.device_s,
        **account,
    }
