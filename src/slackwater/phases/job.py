"""This process's job and phase: one permit at a time, returned however the phase ends."""

import atexit
import concurrent.futures
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from slackwater.model.errors import ConfigError, RefusedError, SlackwaterError
from slackwater.phases.client import JobAsked, NoService, PermitClient, PermitPort, PhasePermit

logger = logging.getLogger(__name__)
URL, KEY, JOB, OFFLINE = "SLACKWATER_URL", "SLACKWATER_KEY", "SLACKWATER_JOB", "SLACKWATER_OFFLINE"
PHASES = ("rollout", "train", "sync")
_ENDLESS = 1_000_000
_ALIVE_S = 5.0  # between two heartbeats
_LOOK_S = 0.5  # how often a waiting thread checks for a deadlock
_WARN_S = 60.0


def is_awaited(thread: threading.Thread, *, by: threading.Thread) -> bool:
    """Whether `by` joins the thread or awaits a future that it computes.

    Other ways to wait (a queue, an event, a task) are invisible here.
    """
    computes = {id(future) for future in _futures_of(thread)}
    for frame in _frames(by):
        name, known = frame.f_code.co_name, frame.f_locals
        owner = known.get("self")
        if name == "join" and owner is thread:
            return True
        if name in ("result", "exception") and id(owner) in computes:
            return True
        if name in ("wait", "as_completed") and computes & {id(f) for f in known.get("fs", ())}:
            return True
    return False


def _futures_of(thread: threading.Thread) -> Iterator[concurrent.futures.Future[object]]:
    """The futures that a thread of a pool computes now."""
    for frame in _frames(thread):
        future = getattr(frame.f_locals.get("self"), "future", None)
        if isinstance(future, concurrent.futures.Future):
            yield future


def _frames(thread: threading.Thread) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


@dataclass(slots=True)
class HeldPhase:
    """A running phase, and how deeply it was entered."""

    permit: PhasePermit
    began_s: float
    thread: threading.Thread = field(default_factory=threading.current_thread)
    depth: int = 1
    counts: tuple[int, int, int] = (0, 0, 0)
    ended: bool = False
    lost: bool = False
    states: list[Any] = field(default_factory=list)  # what was woken, to sleep at its end


# The phase of the running thread or task.
inside: ContextVar[HeldPhase | None] = ContextVar("slackwater_phase", default=None)


class Job:
    """See the module. One thread or task at a time is in a phase; others wait."""

    def __init__(self, port: PermitPort, asked: JobAsked) -> None:
        self.name = asked.name
        self._port = port
        self._turn = threading.Lock()  # a generator may acquire and release it on other threads
        self._held: HeldPhase | None = None
        self._iterations = dict.fromkeys(PHASES, 0)
        self._over = threading.Event()
        port.submit(asked)
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    @property
    def held(self) -> HeldPhase | None:
        """The phase that runs now."""
        return self._held

    def enter(self, phase: str, iteration: int | None = None) -> HeldPhase:
        """Wait for the phase's permit; nested in the same phase a no-op, in another an error."""
        held = inside.get()
        if held is not None and held is self._held:
            if held.permit.phase != phase:
                raise RefusedError(
                    f"phase {phase}: was entered inside phase {held.permit.phase}; "
                    "leave that first, since a job holds one permit at a time"
                )
            held.depth += 1
            return held
        self._take_turn(phase)
        try:
            number = self._iterations[phase] if iteration is None else iteration
            permit = self._port.ask(self.name, phase, number)
            self._iterations[phase] = number + 1
            thread = threading.current_thread()
            self._held = held = HeldPhase(permit, time.monotonic(), thread)
        except BaseException:
            self._turn.release()
            raise
        inside.set(held)
        return held

    def _take_turn(self, phase: str) -> None:
        """Wait until no other thread or task is in a phase; an error if the phase waits for us."""
        waited_s = 0.0
        while not self._turn.acquire(timeout=_LOOK_S):
            waited_s += _LOOK_S
            held, me = self._held, threading.current_thread()
            if held is None:
                continue
            if is_awaited(me, by=held.thread):
                raise RefusedError(
                    f"phase {phase}: was entered by thread {me.name}, for which the "
                    f"{held.permit.phase} phase of thread {held.thread.name} waits; run the thread "
                    "in the phase's context (contextvars.copy_context().run), or after it"
                )
            if waited_s == _WARN_S:
                logger.warning(
                    "phase %s: thread %s has waited %.0f s for the %s phase of thread %s to end",
                    phase,
                    me.name,
                    waited_s,
                    held.permit.phase,
                    held.thread.name,
                )

    def leave(self, held: HeldPhase, before: Callable[[HeldPhase], None] | None = None) -> None:
        """End the phase: run `before` (offloading); at the last nested leave return the permit."""
        held.depth -= 1
        if held.depth:
            return
        held.ended = True
        try:
            if before is not None:
                before(held)
        finally:
            self._held = None
            inside.set(None)
            try:
                self._port.give_back(self.name, held.permit, time.monotonic() - held.began_s)
            finally:
                self._turn.release()

    def report(self, finished: int, total: int, tokens: int) -> None:
        """Report progress; an unreachable service is only logged."""
        held = self._held
        if held is None:
            return
        held.counts = (finished, total, tokens)
        self._send_progress(held)

    def end(self, outcome: str = "finished", reason: str = "") -> None:
        """End the job, once."""
        if not self._over.is_set():
            self._over.set()
            with contextlib.suppress(SlackwaterError):
                self._port.end(self.name, outcome, reason)

    def _send_heartbeats(self) -> None:
        """Send heartbeats at once and periodically: a silent program counts as gone."""
        while not self._over.is_set():
            held = self._held
            if held is not None and not held.lost:
                self._send_progress(held)
            else:
                with contextlib.suppress(SlackwaterError):  # the next phase hears of it
                    self._port.alive(self.name)
            self._over.wait(_ALIVE_S)

    def _send_progress(self, held: HeldPhase) -> None:
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
    """Declare this process's job; defaults come from the environment. Decorators call it.

    `SLACKWATER_URL` and `SLACKWATER_KEY` name the service, `SLACKWATER_JOB` the job;
    `SLACKWATER_OFFLINE=1` runs without a service.
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
        _end_on_sigterm()
        if JOB not in os.environ:  # else whoever started us says when it is over
            atexit.register(_end_at_exit, job)
        return job


def current_job() -> Job:
    """The job of this process, joined now if it was not."""
    return _current or join()


def _port() -> PermitPort:
    if os.environ.get(OFFLINE) == "1":
        return NoService()
    url = os.environ.get(URL)
    if not url:
        raise ConfigError.of(
            URL,
            url,
            "must be the address of a running service (`slackwater up` prints it); "
            "SLACKWATER_OFFLINE=1 runs without one",
        )
    return PermitClient(url, os.environ.get(KEY))


def _end_at_exit(job: Job) -> None:
    failed = getattr(sys, "last_type", None) is not None
    if _terminated.is_set():
        job.end("stopped", "its program was told to end (SIGTERM)")
    else:
        job.end("failed" if failed else "finished")


_terminated = threading.Event()


def _end_on_sigterm() -> None:
    """SIGTERM exits like `sys.exit`, returning permits, unless the program has a handler."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set handlers
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    _terminated.set()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
    sys.exit(128 + number)


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
