"""Runs the driver of every submitted job under a keeper process, which the next control plane
adopts.

A driver's lock (`wire/driver_files.py`) says whether it lives. It is taken here and inherited by
the keeper, so that two drivers of a job can never run, whichever process is killed when.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from slackwater.control.jobs import commands, driver_events
from slackwater.model.ids import JobId
from slackwater.model.job_file import JobFile
from slackwater.runtime.live_driver import FleetDriver, loop_time
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.job_accounts import SubmittedJob, keep_driver
from slackwater.wire.driver_files import DriverFiles

logger = logging.getLogger(__name__)

GRACE_S = 8.0
_LOOK_S = 0.1
_KEEPER_S = 10.0
_WRONG_INPUT = 2  # the status of our own commands whose input is wrong


ProcessCommand: TypeAlias = commands.KeepDriver | commands.StartDriver | commands.EndDriver


@dataclass(slots=True)
class DriverExecutor:
    """Executes the driver registry's commands, those of one job in order.

    `key` returns the API key of a job's driver for the service at `url`; without a `url` no job can
    be submitted. `end_sessions` ends the sessions of a driver that is gone.
    """

    store: Store
    folder: Path
    driver: FleetDriver
    spawn: Callable[[Coroutine[Any, Any, None]], Any]
    key: Callable[[JobId], str]
    end_sessions: Callable[[JobId, str], Awaitable[None]]
    url: str | None
    _locks: defaultdict[JobId, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock), init=False
    )
    _jobs: dict[JobId, JobFile] = field(default_factory=dict, init=False)
    _closing: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.driver.register(self._execute, ProcessCommand.__args__)

    def files(self, job: JobId) -> DriverFiles:
        return DriverFiles(self.folder / job)

    def set_job_file(self, job: JobId, file: JobFile) -> None:
        """Set the file of a job before it is submitted."""
        self._jobs[job] = file

    # ---- adoption and shutdown ----
    async def adopt(self, submitted: SubmittedJob) -> None:
        """Adopt a job of an earlier control plane, whose driver runs, has ended, or died too."""
        self.set_job_file(submitted.job, submitted.file)
        files = self.files(submitted.job)
        lives = files.lives()
        keeper = files.keeper()
        if lives and submitted.over is None and (keeper is None or keeper.url != self.url):
            await self._terminate(submitted.job, submitted.attempt)  # its service URL is gone
            files.forget_exit()
            lives = False
        is_new = not lives and submitted.over is None
        ended = files.exit(submitted.attempt) if is_new else None
        if not lives:
            await self.end_sessions(submitted.job, "its driver is gone")
        self.driver.feed(
            driver_events.DriverAdopted(
                loop_time(),
                submitted.job,
                submitted.tenant,
                submitted.file.terms,
                submitted.file.known_profile,
                submitted.attempt,
                submitted.crashes,
                lives=lives or ended is not None,
                over=submitted.over,
            )
        )
        if ended is not None:
            self._report_end(submitted.job, submitted.attempt, ended.status)
        elif lives:
            self.spawn(self._follow(submitted.job, submitted.attempt, None))

    async def close(self) -> None:
        """Stop all drivers; the next control plane starts them again."""
        self._closing = True
        await asyncio.gather(*(self._stop(job) for job in self._jobs))

    async def _stop(self, job: JobId) -> None:
        async with self._locks[job]:
            files = self.files(job)
            keeper = files.keeper()
            if not files.lives() or keeper is None:
                return
            await self._terminate(job, keeper.attempt)
            ended = files.exit(keeper.attempt)
            if ended is not None and ended.status != 0:
                files.forget_exit()  # it was asked to exit, so this is no crash

    # ---- commands ----
    def _execute(self, command: ProcessCommand) -> None:
        self.spawn(self._execute_in_order(command))

    async def _execute_in_order(self, command: ProcessCommand) -> None:
        async with self._locks[command.job]:
            if isinstance(command, commands.KeepDriver):
                await self.store.call(lambda c: keep_driver(c, command))
            elif isinstance(command, commands.StartDriver):
                await self._start(command.job, command.attempt)
            else:
                self.spawn(self._terminate(command.job, command.attempt))

    async def _start(self, job: JobId, attempt: int) -> None:
        files = self.files(job)
        files.make()
        if self._jobs[job].recipe is None:  # a recipe makes its own
            files.run.mkdir(exist_ok=True)
        lock = files.take_lock()
        while lock is None and not self._closing:  # the attempt before has not ended yet
            await asyncio.sleep(_LOOK_S)
            lock = files.take_lock()
        if lock is None:
            return
        try:
            if self._closing:
                return
            process = self._spawn(job, files, attempt, lock)
        except OSError as error:
            logger.warning("driver not started job=%s error=%s", job, error)
            self._report_end(job, attempt, 127, str(error))
            return
        finally:
            os.close(lock)
        logger.info("driver started job=%s attempt=%d keeper=%d", job, attempt, process.pid)
        self.spawn(self._follow(job, attempt, process))

    def _spawn(
        self, job: JobId, files: DriverFiles, attempt: int, lock: int
    ) -> "subprocess.Popen[bytes]":
        file = self._jobs[job]
        keeper = [sys.executable, "-m", "slackwater.worker.driver_keeper", str(files.root)]
        keeper += [str(attempt), str(lock), str(GRACE_S), *driver_command(file, files.run)]
        with os.fdopen(os.open(files.root / "keeper.log", _APPEND, 0o600), "ab") as log:
            return subprocess.Popen(
                keeper,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=file.workdir or files.root,
                env=self._environment(job, file, files),
                pass_fds=(lock,),
                start_new_session=True,
            )

    def _environment(self, job: JobId, file: JobFile, files: DriverFiles) -> dict[str, str]:
        """The variables of a driver: requests of any client in it belong to its job."""
        url, key = self.url or "", self.key(job)
        inherited = {
            name: value for name, value in os.environ.items() if not name.endswith("_SECRET")
        }
        return {
            "PYTHONUNBUFFERED": "1",
            **inherited,
            **file.env,
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": key,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "SLACKWATER_URL": url,
            "SLACKWATER_KEY": key,
            "SLACKWATER_JOB": file.name,
            "SLACKWATER_MODEL": file.model,
            "SLACKWATER_ITERATIONS": str(file.iterations),
            "SLACKWATER_RUN": str(files.run),
        }

    # ---- ends ----
    async def _follow(
        self, job: JobId, attempt: int, process: "subprocess.Popen[bytes] | None"
    ) -> None:
        """Wait until the driver has ended, whoever started it, and report how."""
        files = self.files(job)
        while files.lives():
            if self._closing:
                return
            if process is not None:
                process.poll()
            await asyncio.sleep(_LOOK_S)
        if process is not None:
            await asyncio.to_thread(process.wait)
        if self._closing:
            return
        ended = files.exit(attempt)
        status = -signal.SIGKILL if ended is None else ended.status
        await self.end_sessions(job, f"its driver ended with {status}")
        self._report_end(job, attempt, status)

    def _report_end(self, job: JobId, attempt: int, status: int, error: str | None = None) -> None:
        logger.info("driver ended job=%s attempt=%d status=%d", job, attempt, status)
        words = self.files(job).last_lines() if error is None else error
        hopeless = status == _WRONG_INPUT and self._jobs[job].recipe is not None
        output = "" if status == 0 else words
        self.driver.feed(
            driver_events.DriverEnded(loop_time(), job, attempt, status, output, hopeless)
        )

    async def _terminate(self, job: JobId, attempt: int) -> None:
        """Ask the keeper to end the driver; kill both if it does not in time."""
        files, loop = self.files(job), asyncio.get_running_loop()
        deadline_s = loop.time() + GRACE_S + _KEEPER_S
        is_asked = False
        while files.lives():
            keeper = files.keeper()
            if keeper is not None and keeper.attempt == attempt:
                if not is_asked:
                    _kill(keeper.keeper, signal.SIGTERM)
                    is_asked = True
                elif loop.time() > deadline_s:
                    _kill(keeper.keeper, signal.SIGKILL)
                    _kill(-keeper.driver, signal.SIGKILL)
                    return
            if loop.time() > deadline_s + _KEEPER_S:
                return
            await asyncio.sleep(_LOOK_S)


def driver_command(file: JobFile, run: Path) -> list[str]:
    """The command of a driver. It has no key: everybody can read a process's arguments."""
    if file.recipe is None:
        return list(file.command)
    command = [sys.executable, "-m", "slackwater", "train", file.recipe, "--run", str(run)]
    return [*command, *(word for pair in file.assignments() for word in ("--set", pair))]


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def _kill(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)
