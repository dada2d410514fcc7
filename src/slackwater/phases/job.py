"""The job that this process is, and the phase that it is in: one permit at a time, given back however the phase ends."""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from slackwater.model.errors import ConfigError, RefusedError, SlackwaterError
from slackwater.phases.client import JobAsked, NoService, Permit, PermitClient, PermitPort

logger = logging.getLogger(__name__)

URL, KEY, JOB, OFFLINE = "SLACKWATER_URL", "SLACKWATER_KEY", "SLACKWATER_JOB", "SLACKWATER_OFFLINE"
PHASES = ("rollout", "train", "sync")
_ENDLESS = 1_000_000
_ALIVE_S = 5.0  # how often the program says that it lives


@dataclass(slots=True)
class Held:
    """A phase that runs, and how deep in it we are."""

    permit: Permit
    began_s: float
    depth: int = 1
    counts: tuple[int, int, int] = (0, 0, 0)
    ended: bool = False
    lost: bool = False


# The phase that the running code is inside of: its thread's, its task's.
inside: ContextVar[Held | None] = ContextVar("slackwater_phase", default=None)


class Job:
    """See the module. One thread or task at a time is in a phase; others of the process wait for their turn."""

    def __init__(self, port: PermitPort, asked: JobAsked) -> None:
        self.name = asked.name
        self._port = port
        self._turn = (
            threading.Lock()
        )  # taken and given back by whichever thread a generator runs on
        self._held: Held | None = None
        self._iterations = dict.fromkeys(PHASES, 0)
        self._over = threading.Event()
        port.submit(asked)
        threading.Thread(target=self._say_alive, daemon=True).start()

    @property
    def held(self) -> Held | None:
        """The phase that runs now."""
        return self._held

    def enter(self, phase: str, iteration: int | None = None) -> Held:
        """Wait for the phase's permit. Inside the same phase that is no new phase; inside another it is an error."""
        held = inside.get()
        if held is not None and held is self._held:
            if held.permit.phase != phase:
                raise RefusedError(
                    f"phase {phase}: was entered inside phase {held.permit.phase}; "
                    "leave that first, since a job holds one permit at a time"
                )
            held.depth += 1
            return held
        self._turn.acquire()
        try:
            number = self._iterations[phase] if iteration is None else iteration
            permit = self._port.ask(self.name, phase, number)
            self._iterations[phase] = number + 1
            self._held = held = Held(permit, time.monotonic())
        except BaseException:
            self._turn.release()
            raise
        inside.set(held)
        return held

    def leave(self, held: Held, before: Callable[[], None] | None = None) -> None:
        """The phase is over: run `before` (offloading), then give the permit back. The last of nested leaves does it."""
        held.depth -= 1
        if held.depth:
            return
        held.ended = True
        try:
            if before is not None:
                before()
        finally:
            self._held = None
            inside.set(None)
            try:
                self._port.give_back(self.name, held.permit, time.monotonic() - held.began_s)
            finally:
                self._turn.release()

    def report(self, finished: int, total: int, tokens: int) -> None:
        """How far the phase is. A service that does not hear it is not the program's trouble."""
        held = self._held
        if held is None:
            return
        held.counts = (finished, total, tokens)
        self._tell(held)

    def end(self, outcome: str = "finished", reason: str = "") -> None:
        """The job is over; said once."""
        if not self._over.is_set():
            self._over.set()
            with contextlib.suppress(SlackwaterError):
                self._port.end(self.name, outcome, reason)

    def _say_alive(self) -> None:
        while not self._over.wait(_ALIVE_S):
            held = self._held
            if held is not None and not held.lost:
                self._tell(held)
            else:
                with contextlib.suppress(SlackwaterError):  # the next phase hears of it
                    self._port.alive(self.name)

    def _tell(self, held: Held) -> None:
        try:
            held.lost = not self._port.progress(self.name, held.permit, *held.counts)
        except SlackwaterError as error:
            logger.warning("progress was not heard: %s", error)
            return
        if held.lost and not held.ended:
            logger.warning("permit %d was taken away: the phase ran too long", held.permit.number)


_current: Job | None = None
_lock = threading.Lock()


def join(
    name: str | None = None,
    *,
    iterations: int | None = None,
    slo: float | None = None,
    priority: int = 0,
    profile: dict[str, float] | None = None,
) -> Job:
    """Say which job this process is; what is left out comes from the environment. The decorators do it by themselves.

    `SLACKWATER_URL` and `SLACKWATER_KEY` name the service, `SLACKWATER_JOB` the job; `SLACKWATER_OFFLINE=1` runs without a service.
    """
    global _current
    with _lock:
        if _current is not None:
            if name is not None and name != _current.name:
                raise RefusedError(f"job {name}: this process is job {_current.name} already")
            return _current
        asked = JobAsked(
            name or os.environ.get(JOB) or f"{Path(sys.argv[0]).stem or 'python'}-{os.getpid()}",
            iterations if iterations is not None else _whole("SLACKWATER_ITERATIONS", _ENDLESS),
            slo if slo is not None else _number("SLACKWATER_SLO", 2.0),
            priority,
            profile,
        )
        _current = job = Job(_port(), asked)
        if JOB not in os.environ:  # else whoever started us says when it is over
            atexit.register(_at_exit, job)
        return job


def current_job() -> Job:
    """The job of this process, joined now if it was not."""
    return _current or join()


def leave_job(outcome: str = "finished", reason: str = "") -> None:
    """The job of this process is over; the next phase would be of a new one."""
    global _current
    with _lock:
        job, _current = _current, None
    if job is not None:
        job.end(outcome, reason)


def _port() -> PermitPort:
    if os.environ.get(OFFLINE) == "1":
        return NoService()
    url = os.environ.get(URL)
    if not url:
        raise ConfigError.of(
            URL,
            url,
            "must be the address of a running service (`slackwater up` prints it); SLACKWATER_OFFLINE=1 runs without one",
        )
    return PermitClient(url, os.environ.get(KEY))


def _at_exit(job: Job) -> None:
    failed = getattr(sys, "last_type", None) is not None
    job.end("failed" if failed else "finished")


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdigit():
        raise ConfigError.of(name, text, "must be a whole number")
    return int(text) if text else default


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ConfigError.of(name, text, "must be a number") from None
