"""Replays a spot trace as a provider: instances can be had while the trace has them, and cost
while held.
"""

from collections.abc import Callable, Sequence
from functools import partial

from slackwater.model.ids import InstanceId
from slackwater.model.instance import InstanceKind
from slackwater.sim.rollout.body import SimulatedBody
from slackwater.sim.rollout.engine_cost import EngineCost
from slackwater.sim.rollout.spot_trace import SpotEvent


class SpotProvider:
    """Holds as many of the available instances as `limit()` allows, oldest first."""

    def __init__(
        self,
        body: SimulatedBody,
        engine: EngineCost,
        *,
        max_running: int,
        limit: Callable[[], int | None],
        start_s: float = 20.0,
        slowdown_of: Callable[[int], float] = lambda number: 1.0,
    ) -> None:
        """`slowdown_of` says of the n-th instance that is taken how many times as long its work
        takes.
        """
        self._body = body
        self._engine = engine
        self._max_running = max_running
        self._limit = limit
        self._start_s = start_s
        self._available: dict[InstanceId, None] = {}
        self._held: dict[InstanceId, float] = {}
        self._held_seconds = 0.0
        self._slowdown_of = slowdown_of
        self._numbers: dict[InstanceId, int] = {}

    def replay(self, events: Sequence[SpotEvent]) -> None:
        """Let the trace happen."""
        for row in events:
            self._body.at(row.t_s, partial(self._happen, row))

    def held_seconds(self, now_s: float) -> float:
        """Instance-seconds paid for so far."""
        return self._held_seconds + sum(now_s - since_s for since_s in self._held.values())

    def review(self) -> None:
        """Take more instances if the limit and the offer allow it; those held are kept."""
        limit = self._limit()
        for instance in list(self._available):
            if instance in self._held:
                continue
            if limit is None or len(self._held) < limit:
                self._take(instance)

    def _happen(self, row: SpotEvent) -> None:
        instance = InstanceId(row.instance_id)
        if row.event == "add":
            self._available[instance] = None
        else:
            self._available.pop(instance, None)
            if instance in self._held:
                self._drop(instance)
                self._body.lose(instance)
        self.review()

    def _take(self, instance: InstanceId) -> None:
        since_s = self._body.now_s
        self._held[instance] = since_s
        slowdown = self._slowdown_of(self._numbers.setdefault(instance, len(self._numbers)))

        def up() -> None:
            if self._held.get(instance) == since_s:
                self._body.join(
                    instance,
                    InstanceKind.SPOT,
                    self._engine,
                    max_running=self._max_running,
                    slowdown=slowdown,
                )

        self._body.at(since_s + self._start_s, up)

    def _drop(self, instance: InstanceId) -> None:
        self._held_seconds += self._body.now_s - self._held.pop(instance)
