"""Jobs' accounts, durable: written down now and then, and taken over by the next start."""

from dataclasses import asdict
from typing import Any

import msgspec
from sqlalchemy.engine import Connection

from slackwater.control.jobs.events import JobAdopted
from slackwater.control.jobs.registry import RegisteredJob
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job_life import JobAccount, JobStage
from slackwater.runtime.store.facts import find_fact, put_fact

_NAME = "job_accounts"


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
