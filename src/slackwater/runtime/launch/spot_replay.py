"""Replays a spot trace: adds start instances, removes end them."""

import asyncio
from collections.abc import Sequence

from slackwater.model.errors import ConfigError
from slackwater.model.ids import InstanceId
from slackwater.model.spot_trace import SpotEvent
from slackwater.runtime.launch.children import Children


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
