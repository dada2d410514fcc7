"""A service that also measures itself: how late its event loop is, and what decisions take.

    python -m benchmarks.service.watched_service FILE up --state ...

The arguments after FILE are those of `slackwater`. FILE is written once a second.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.service.times import Times
from slackwater.cli import service_process
from slackwater.cli.main import main
from slackwater.control.controller import Controller
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.rollout import events
from slackwater.runtime.plane import ControlPlane

DECISIONS = (events.TurnSubmitted, events.TurnEnded, events.InstanceLost)
_LOOK_EVERY_S = 0.005
_WRITE_EVERY_S = 1.0


class TimedController:
    """Times the decisions of a controller: turns submitted, ended, and moved off a lost engine."""

    def __init__(self, controller: Controller[FleetEvent, FleetCommand]) -> None:
        self._controller = controller
        self.wall, self.cpu = Times(), Times()

    def handle(self, event: FleetEvent) -> Sequence[FleetCommand]:
        if not isinstance(event, DECISIONS):
            return self._controller.handle(event)
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        commands = self._controller.handle(event)
        self.cpu.add(time.thread_time() - cpu_s)
        self.wall.add(time.perf_counter() - began_s)
        return commands


class WatchedPlane(ControlPlane):
    """A control plane whose driver has a timed controller."""

    file: Path

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._timed = TimedController(self.controller)
        self.runtime.controller = self._timed
        self._lag = Times()

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        self._look(loop, loop.time())
        self._write(loop)

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now_s = loop.time()
        self._lag.add(max(now_s - due_s, 0.0))
        loop.call_at(now_s + _LOOK_EVERY_S, self._look, loop, now_s + _LOOK_EVERY_S)

    def _write(self, loop: asyncio.AbstractEventLoop) -> None:
        times = {"lag": self._lag, "decision": self._timed.wall, "decision_cpu": self._timed.cpu}
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps({name: found.counts for name, found in times.items()}))
        part.replace(self.file)
        loop.call_later(_WRITE_EVERY_S, self._write, loop)


if __name__ == "__main__":
    WatchedPlane.file = Path(sys.argv.pop(1)).resolve()
    service_process.ControlPlane = WatchedPlane  # type: ignore[attr-defined, assignment]  # what `up` makes
    main()
