"""The live runtime of the fleet controller: its driver, and who executes which command."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from slackwater.control.controller import Controller
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.runtime.live_driver import NewDriver, live_driver

logger = logging.getLogger(__name__)


class FleetRuntime:
    """Feeds the controller; each executor registers the types of commands that it executes."""

    def __init__(
        self,
        controller: Controller[FleetEvent, FleetCommand],
        new_driver: NewDriver = live_driver,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`around` holds while an event is handled."""
        self._executors: dict[type, Callable[[Any], None]] = {}
        self._driver = new_driver(controller, self._execute, around=around)
        self.feed = self._driver.feed

    def register(self, execute: Callable[[Any], None], kinds: Iterable[type]) -> None:
        """From now on `execute` is called with commands of these types."""
        self._executors |= dict.fromkeys(kinds, execute)

    def close(self) -> None:
        """No timer fires any more."""
        self._driver.close()

    def _execute(self, command: FleetCommand) -> None:
        execute = self._executors.get(type(command))
        if execute is None:
            logger.error("a command that nobody executes: %s", type(command).__name__)
        else:
            execute(command)
