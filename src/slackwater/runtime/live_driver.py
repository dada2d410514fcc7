"""Drivers on the event loop: its clock, its timers, and what follows when a controller raises."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

from slackwater.control.controller import Controller, Timed
from slackwater.control.driver import Driver
from slackwater.control.fleet.messages import FleetCommand, FleetEvent

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Timed)
C = TypeVar("C")

FleetDriver: TypeAlias = Driver[FleetEvent, FleetCommand]

_HELD_UP_S = 1.0
_HEARING_S = 0.2


def loop_time() -> float:
    """The event loop's clock, read now: the loop's own reading may be some milliseconds old."""
    return time.monotonic()


def call_at(at_s: float, due: Callable[[], None]) -> None:
    """Call back at `at_s`; a time that is past is due as soon as it can be."""
    asyncio.get_running_loop().call_at(at_s, _call, at_s, due)


def _call(at_s: float, due: Callable[[], None]) -> None:
    """If the loop was held up, let it first hear what came meanwhile: nobody is silent then."""
    if loop_time() - at_s > _HELD_UP_S:
        asyncio.get_running_loop().call_later(_HEARING_S, due)
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

    If the controller raises, `died` is called, and the next start recovers from the durable log.
    """

    def log_unhandled(command: C) -> None:
        logger.error("a command that nobody executes: %s", type(command).__name__)

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
