"""Submitted jobs for the HTTP API: accept, describe, stop and resume them, and read their logs."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetEvent
from slackwater.control.jobs import driver_events
from slackwater.control.jobs.drivers import DriverStage
from slackwater.control.jobs.events import JobEnded, JobSubmitted
from slackwater.model.config import decode
from slackwater.model.errors import ConfigError, NotFoundError, RefusedError, UnavailableError
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job_file import JobFile, OwnJob
from slackwater.model.job_life import JobStage, job_id_of
from slackwater.runtime.executors.drivers import DriverExecutor, driver_command
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.store.base_models import BaseModels
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.job_accounts import (
    SubmittedJob,
    add_job,
    job_row,
    read_submitted_jobs,
)
from slackwater.wire.driver_files import DriverFiles

MOST_LOG_BYTES = 1 << 20
_CURVES_BYTES = 16 << 10


@dataclass(eq=False)
class Submissions:
    """Only the operator may submit jobs with a driver: they run commands on this machine."""

    store: Store
    controller: FleetController
    feed: Callable[[FleetEvent], None]
    executor: DriverExecutor
    bases: BaseModels

    def __post_init__(self) -> None:
        self._jobs: dict[JobId, SubmittedJob] = {}
        self._submit_lock = asyncio.Lock()

    # ---- from one start to the next ----
    async def read(self) -> dict[JobId, SubmittedJob]:
        self._jobs = {
            submitted.job: submitted for submitted in await self.store.call(read_submitted_jobs)
        }
        return dict(self._jobs)

    async def adopt_drivers(self) -> None:
        await asyncio.gather(*(self.executor.adopt(submitted) for submitted in self._jobs.values()))

    # ---- requests of people ----
    async def submit(
        self, tenant: TenantId, table: dict[str, Any], *, replace: bool
    ) -> dict[str, Any]:
        """Submit a job; it is durable when this returns.

        The program of a job without a recipe or command is run by its owner with a job key.
        """
        if "recipe" not in table and "command" not in table:
            return self._accept_client_job(tenant, decode(OwnJob, table))
        file = decode(JobFile, table)
        self._check(file)
        async with self._submit_lock:
            await self._accept(tenant, job_id_of(tenant, file.name), file, replace)
        return self.describe(tenant, file.name)

    async def _accept(self, tenant: TenantId, job: JobId, file: JobFile, replace: bool) -> None:
        entry, driver = self.controller.jobs.find(job), self.controller.drivers.find(job)
        if driver is not None and (driver.stage is not DriverStage.OVER or not replace):
            how = "runs" if driver.over is None else f"has {driver.over}"
            if driver.stage is not DriverStage.OVER:
                fix = "stop it, or give this one another name"
            else:
                fix = "resume it, replace it (--replace), or give this one another name"
            raise RefusedError(f"name: {file.name!r} is a job that {how}; {fix}")
        if driver is None and entry is not None and not entry.stage.over:
            raise RefusedError(
                f"name: {file.name!r} is the job of a session that is open; take another"
            )
        files = self.executor.files(job)
        if files.root.exists():
            await asyncio.to_thread(_forget, files)
        self.executor.set_job_file(job, file)
        submitted = await self.store.call(lambda c: add_job(c, job, tenant, file))
        self._jobs[job] = submitted
        self.feed(
            driver_events.DriverSubmitted(loop_time(), job, tenant, file.terms, file.known_profile)
        )

    def _accept_client_job(self, tenant: TenantId, own: OwnJob) -> dict[str, Any]:
        """Submit a job whose program its owner runs; a name that is not over is the same job."""
        job = job_id_of(tenant, own.name)
        entry = self.controller.jobs.find(job)
        if entry is not None and not entry.stage.over and entry.terms is None:
            raise RefusedError(
                f"name: {own.name!r} runs already without terms; submit it before its first session"
            )
        self.feed(JobSubmitted(loop_time(), job, tenant, own.known_profile, own.terms))
        return self.describe(tenant, own.name)

    def stop(self, tenant: TenantId, name: str) -> dict[str, Any]:
        """Ask the driver of a job to exit; the job has stopped when its stage says so.

        A job whose program its owner runs stops at once, and the program learns it at its next
        phase.
        """
        job = self._find(tenant, name)
        entry = self.controller.jobs.find(job)
        if job in self._jobs:
            self.feed(driver_events.StopAsked(loop_time(), job))
        elif entry is not None and entry.terms is not None:
            self.feed(JobEnded(loop_time(), job, "stopped", "the operator stopped it"))
        else:
            raise RefusedError(
                f"job {name}: was not submitted; it ends with its sessions, or when nothing "
                "comes of it any more"
            )
        return self.describe(tenant, name)

    def resume(self, tenant: TenantId, name: str) -> dict[str, Any]:
        """Start a job again from its last complete iteration."""
        job = self._find_submitted(tenant, name)
        driver = self.controller.drivers.find(job)
        if driver is None or driver.stage is not DriverStage.OVER:
            raise RefusedError(f"job {name}: is not over; only a job that is can be resumed")
        entry = self.controller.jobs.find(job)
        if entry is not None and entry.stage is JobStage.FINISHED:
            raise RefusedError(
                f"job {name}: has finished, so there is nothing to resume; "
                "`slackwater job submit FILE --replace` runs it again"
            )
        self.feed(driver_events.ResumeAsked(loop_time(), job))
        return self.describe(tenant, name)

    def describe(self, tenant: TenantId, name: str) -> dict[str, Any]:
        job = self._find(tenant, name)
        entry = self.controller.jobs.find(job)
        assert entry is not None
        row = job_row(entry, loop_time())
        submitted, driver = self._jobs.get(job), self.controller.drivers.find(job)
        if submitted is None or driver is None:
            return row
        files = self.executor.files(job)
        keeper = files.keeper() if driver.stage in _HAS_PROCESS else None
        command = driver_command(submitted.file, files.run)
        return {
            **row,
            **_submission_row(submitted),
            **_progress(files),
            "command": command,
            "env": sorted(submitted.file.env),  # the values may be secrets
            "profile": None if entry.profile is None else asdict(entry.profile),
            "run": str(files.run),
            "driver": {
                "stage": driver.stage.value,
                "attempt": driver.attempt,
                "pid": None if keeper is None else keeper.driver,
                "keeper_pid": None if keeper is None else keeper.keeper,
                "crashes_in_a_row": driver.crashes,
            },
        }

    def add_progress(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the submission and the progress of submitted jobs to rows."""
        for row in rows:
            if (submitted := self._jobs.get(row["job"])) is not None:
                row |= _submission_row(submitted) | _progress(self.executor.files(submitted.job))
        return rows

    def log(self, tenant: TenantId, name: str, place: int, most: int) -> dict[str, Any]:
        """The drivers' log from `place` on, and the next place (`DriverFiles.read_log`)."""
        job = self._find_submitted(tenant, name)
        place, output = self.executor.files(job).read_log(place, min(most, MOST_LOG_BYTES))
        entry = self.controller.jobs.find(job)
        over = entry is None or entry.stage.over
        return {"text": output.decode(errors="replace"), "place": place, "over": over}

    def _check(self, file: JobFile) -> None:
        if self.executor.url is None:
            raise UnavailableError("jobs cannot be submitted while the service starts or stops")
        models = [base.name for base in self.bases]
        if file.model not in models:
            fix = f"is not served here; there are: {', '.join(models) or 'none'}"
            raise ConfigError.of("model", file.model, fix)
        if file.workdir is not None and not Path(file.workdir).is_dir():
            raise ConfigError.of("workdir", file.workdir, "must be a directory that exists")

    def _find(self, tenant: TenantId, name: str) -> JobId:
        for job in (JobId(name), JobId(f"{tenant}/{name}")):
            entry = self.controller.jobs.find(job)
            if entry is not None and entry.tenant == tenant:
                return job
        raise NotFoundError(f"job: {name!r} is not a job of yours; `slackwater job list` has them")

    def _find_submitted(self, tenant: TenantId, name: str) -> JobId:
        job = self._find(tenant, name)
        if job not in self._jobs:
            raise RefusedError(
                f"job: {name!r} has no driver here; it is its own client's to stop or resume"
            )
        return job


_HAS_PROCESS = (DriverStage.RUNNING, DriverStage.LEAVING)


def _submission_row(submitted: SubmittedJob) -> dict[str, Any]:
    file = submitted.file
    return {
        "name": file.name,
        "model": file.model,
        "recipe": file.recipe,
        "iterations": file.iterations,
        "slo": file.slo,
        "slo_scope": file.slo_scope,
        "priority": file.priority,
        "duty_ratio": file.duty_ratio,
        "submitted_s": submitted.created_s,
    }


def _progress(files: DriverFiles) -> dict[str, Any]:
    """The progress of a driver: the last whole line of `metrics.jsonl` in its run folder."""
    try:
        with (files.run / "metrics.jsonl").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _CURVES_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                return {"iteration": row["step"] + 1, "reward": row.get("reward")}
    return {}


def _forget(files: DriverFiles) -> None:
    """Delete what an earlier job of the name left, but not the lock, which others may have open."""
    for path in files.root.iterdir():
        if path.name == "lock":
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
