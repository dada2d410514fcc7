"""Durable jobs: submitted jobs, and the accounts of all jobs, which are saved now and then."""

import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from slackwater.control.jobs.commands import KeepDriver
from slackwater.control.jobs.events import JobAdopted
from slackwater.control.jobs.registry import RegisteredJob
from slackwater.model.config import decode, plain
from slackwater.model.errors import NotFoundError
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job_file import JobFile
from slackwater.model.job_life import JobAccount, JobStage
from slackwater.runtime.store.facts import find_fact, put_fact
from slackwater.runtime.store.schema import jobs

_NAME = "job_accounts"


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """One row of `jobs`."""

    job: JobId
    tenant: TenantId
    file: JobFile
    attempt: int
    crashes: int
    over: JobStage | None
    reason: str
    created_s: float
    ended_s: float | None


def add_job(connection: Connection, job: JobId, tenant: TenantId, file: JobFile) -> SubmittedJob:
    """Add a job, which replaces one of its name that is over and continues its attempt numbers."""
    known = find_job(connection, job)
    if known is not None and known.tenant != tenant:
        raise NotFoundError(f"job: {job!r} is not one of yours")
    attempt = 0 if known is None else known.attempt
    connection.execute(jobs.delete().where(jobs.c.job == job))
    row = {"job": job, "tenant": tenant, "submission": json.dumps(plain(file))}
    counts = {"attempt": attempt, "crashes": 0, "over": None, "reason": "", "ended_s": None}
    created_s = time.time()
    connection.execute(jobs.insert().values(**row, **counts, created_s=created_s))
    return SubmittedJob(job, tenant, file, attempt, 0, None, "", created_s, None)


def keep_driver(connection: Connection, driver: KeepDriver) -> None:
    ended_s = None if driver.over is None else time.time()
    known = jobs.update().where(jobs.c.job == driver.job)
    connection.execute(known.values(**msgspec.structs.asdict(driver), ended_s=ended_s))


def find_job(connection: Connection, job: JobId) -> SubmittedJob | None:
    row = connection.execute(sa.select(jobs).where(jobs.c.job == job)).first()
    return None if row is None else _job_of(row)


def read_submitted_jobs(connection: Connection) -> list[SubmittedJob]:
    """All of them, oldest first."""
    return [_job_of(row) for row in connection.execute(sa.select(jobs).order_by(jobs.c.created_s))]


def _job_of(row: Row[Any]) -> SubmittedJob:
    file = decode(JobFile, json.loads(row.submission))
    over = None if row.over is None else JobStage(row.over)
    counts = (row.attempt, row.crashes, over, row.reason, row.created_s, row.ended_s)
    return SubmittedJob(JobId(row.job), TenantId(row.tenant), file, *counts)


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
    save = partial(msgspec.convert, type=SavedAccount, from_attributes=True)
    put_fact(connection, _NAME, [save(entry) for entry in entries])


def read_accounts(connection: Connection, now_s: float) -> list[JobAdopted]:
    """Read the saved accounts, as events for the job registry."""
    saved = find_fact(connection, _NAME, list[SavedAccount]) or ()
    rows = [msgspec.structs.asdict(row) for row in saved]
    return [JobAdopted(now_s, stage=row.pop("over") or JobStage.STOPPED, **row) for row in rows]


def job_row(entry: RegisteredJob, now_s: float) -> dict[str, Any]:
    """A job as `slackwater job list` and the HTTP API show it."""
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
