"""Jobs' accounts, durable: written down now and then, and taken over by the next start."""

from dataclasses import asdict
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from slackwater.control.jobs.events import JobAdopted
from slackwater.control.jobs.registry import RegisteredJob
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job_life import JobAccount, JobStage
from slackwater.runtime.store.schema import facts

_NAME = "job_accounts"


def save_accounts(connection: Connection, entries: list[RegisteredJob]) -> None:
    """All of them, in one row."""
    held = [
        {
            "job": e.job,
            "tenant": e.tenant,
            "account": asdict(e.account),
            "over": e.stage.value if e.stage.over else None,
            "reason": e.reason,
            "iterations_done": e.iterations_done,
            "crashes": e.crashes,
        }
        for e in entries
    ]
    value = msgspec.json.encode(held).decode()
    changed = connection.execute(facts.update().where(facts.c.name == _NAME).values(value=value))
    if not changed.rowcount:
        connection.execute(facts.insert().values(name=_NAME, value=value))


def saved_accounts(connection: Connection, now_s: float) -> list[JobAdopted]:
    """As events for the job book."""
    value = connection.execute(sa.select(facts.c.value).where(facts.c.name == _NAME)).scalar()
    held: list[dict[str, Any]] = [] if value is None else msgspec.json.decode(value)
    return [
        JobAdopted(
            now_s,
            JobId(row["job"]),
            TenantId(row["tenant"]),
            msgspec.convert(row["account"], JobAccount),
            JobStage(row.get("over") or JobStage.STOPPED),
            row.get("reason", ""),
            row.get("iterations_done", 0),
            row.get("crashes", 0),
        )
        for row in held
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
