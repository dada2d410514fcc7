"""Submitted jobs, durable: the request, the number of driver attempts, and how each ended."""

import json
import time
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from slackwater.control.jobs.driver_commands import KeepDriver
from slackwater.model.config import decode, plain
from slackwater.model.errors import NotFoundError
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job_file import JobFile
from slackwater.model.job_life import JobStage
from slackwater.runtime.store.schema import jobs


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """One row."""

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
    """A new one; one of the same name that is over is replaced, and its attempts go on counting."""
    held = find_job(connection, job)
    if held is not None and held.tenant != tenant:
        raise NotFoundError(f"job: {job!r} is not one of yours")
    attempt = 0 if held is None else held.attempt
    connection.execute(jobs.delete().where(jobs.c.job == job))
    row = {"job": job, "tenant": tenant, "submission": json.dumps(plain(file))}
    counts = {"attempt": attempt, "crashes": 0, "over": None, "reason": "", "ended_s": None}
    created_s = time.time()
    connection.execute(jobs.insert().values(**row, **counts, created_s=created_s))
    return SubmittedJob(job, tenant, file, attempt, 0, None, "", created_s, None)


def keep_driver(connection: Connection, kept: KeepDriver) -> None:
    """What the driver book knows of it now."""
    ended_s = None if kept.over is None else time.time()
    connection.execute(
        jobs.update()
        .where(jobs.c.job == kept.job)
        .values(
            attempt=kept.attempt,
            crashes=kept.crashes,
            over=kept.over,
            reason=kept.reason,
            ended_s=ended_s,
        )
    )


def find_job(connection: Connection, job: JobId) -> SubmittedJob | None:
    row = connection.execute(sa.select(jobs).where(jobs.c.job == job)).first()
    return None if row is None else _of(row)


def submitted_jobs(connection: Connection) -> list[SubmittedJob]:
    """All of them, oldest first."""
    return [_of(row) for row in connection.execute(sa.select(jobs).order_by(jobs.c.created_s))]


def _of(row: Row[Any]) -> SubmittedJob:
    file = decode(JobFile, json.loads(row.submission))
    over = None if row.over is None else JobStage(row.over)
    counts = (row.attempt, row.crashes, over, row.reason, row.created_s, row.ended_s)
    return SubmittedJob(JobId(row.job), TenantId(row.tenant), file, *counts)
