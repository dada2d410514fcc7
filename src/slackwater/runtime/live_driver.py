"""Drivers on the event loop: its clock, its timers, and what happens when a controller raises."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from slackwater.control.controller import Controller, TimedEvent
from slackwater.control.driver import Driver
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.model.errors import ConfigError

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=TimedEvent)
C = TypeVar("C")

FleetDriver: TypeAlias = Driver[FleetEvent, FleetCommand]

_BLOCKED_S = 1.0
_READ_S = 0.2


# The event loop's clock, read now: the loop's own reading may be some milliseconds old.
loop_time = time.monotonic


def call_at(at_s: float, due: Callable[[], None]) -> None:
    """Call back at `at_s`; a time that is past is due as soon as it can be."""
    asyncio.get_running_loop().call_at(at_s, _call, at_s, due)


def _call(at_s: float, due: Callable[[], None]) -> None:
    """After a blocked loop first read the sockets: a worker may have sent a heartbeat."""
    if loop_time() - at_s > _BLOCKED_S:
        asyncio.get_running_loop().call_later(_READ_S, due)
    else:
        due()


def live_driver(
    controller: Controller[E, C],
    *,
    around: Callable[[], AbstractContextManager[object]] | None = None,
    record: Callable[[bytes], None] | None = None,
    on_failure: Callable[[], None] = lambda: None,
) -> Driver[E, C]:
    """The driver of a live controller; each executor registers the commands that it executes.

    `on_failure` is called when the controller raises; the next start recovers from the durable log.
    """

    def log_unhandled(command: C) -> None:
        logger.error("no executor is registered for command=%s", type(command).__name__)

    def report_failure(event: E) -> None:
        logger.exception("a controller raised event=%s", type(event).__name__)
        on_failure()

    return Driver(
        controller,
        log_unhandled,
        clock=loop_time,
        schedule=call_at,
        record=record,
        failed=report_failure,
        around=around,
    )


class Recording:
    """The files to which controllers' events are recorded: `<record>.<name>.jsonl`, rewritten at
    each start; none without a path.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._files = ExitStack()

    def writer(self, name: str) -> Callable[[bytes], Any] | None:
        """The function that writes a controller's lines; None if nothing is recorded."""
        if self._path is None:
            return None
        path = Path(f"{self._path}.{name}.jsonl")
        try:
            return self._files.enter_context(path.open("wb")).write
        except OSError as error:
            fix = f"cannot be written ({error.strerror}); give a file in a folder that exists"
            raise ConfigError.of("--record", str(self._path), fix) from None

    def close(self) -> None:
        self._files.close()
