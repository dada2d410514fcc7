"""Replays a spot trace: its adds start instances, its removes take them away."""

import asyncio
import gzip
from collections.abc import Sequence
from pathlib import Path

from slackwater.model.errors import ConfigError
from slackwater.model.ids import InstanceId
from slackwater.model.spot_trace import SpotEvent, spot_events
from slackwater.runtime.launch.children import Children


def read_spot_trace(file: Path) -> tuple[SpotEvent, ...]:
    """The events of a `.csv` or `.csv.gz` file."""
    if not file.is_file():
        raise ConfigError.of("spot trace", str(file), "is no file")
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8", newline="") as lines:
            return spot_events(lines, file.name)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError.of("spot trace", str(file), f"cannot be read: {error}") from None


class SpotReplay:
    """One second of the trace takes `1 / speed` seconds.

    A remove gives `notice_s` (of real time) to the instance; with none it is killed at once.
    """

    def __init__(
        self,
        events: Sequence[SpotEvent],
        onto: Children,
        *,
        speed: float = 1.0,
        notice_s: float = 0.0,
    ) -> None:
        if speed <= 0:
            raise ConfigError.of("spot replay: speed", speed, "must be above 0")
        if notice_s < 0:
            raise ConfigError.of("spot replay: notice_s", notice_s, "must be at least 0")
        self._events = tuple(events)
        self._onto = onto
        self._speed = speed
        self._notice_s = notice_s

    async def run(self) -> None:
        """Play the trace to its end."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for event in self._events:
            await asyncio.sleep(began_s + event.t_s / self._speed - loop.time())
            if event.event == "add":
                self._onto.start(InstanceId(event.instance_id))
            else:
                self._take(InstanceId(event.instance_id))

    def _take(self, instance: InstanceId) -> None:
        if self._notice_s > 0:
            self._onto.notice(instance, self._notice_s)
        else:
            self._onto.kill(instance)
