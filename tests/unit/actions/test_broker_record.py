"""What the broker saw and did can be recorded, and replaying the record gives the same commands."""

from slackwater.control.actions import events as on
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.record import RecordedController, replay
from slackwater.sim.actions.storm import Storm


class RecordedStorm(Storm):
    """A storm over one broker, whose events are kept."""

    def __init__(self, seed: int) -> None:
        self.seen: list[on.Event] = []
        super().__init__(seed)

    def happen(self, event: on.Event) -> None:
        self.seen.append(event)
        super().happen(event)

    def _restart(self) -> None:
        """Not this time: one broker must see everything."""


def test_a_recorded_storm_replays_to_the_same_commands() -> None:
    storm = RecordedStorm(seed=6)
    storm.run(0.4)
    lines: list[bytes] = []
    recorded = RecordedController(ActionBroker(storm.settings), lines.append)
    for event in storm.seen:
        recorded.handle(event)
    agreed, divergence = replay(ActionBroker(storm.settings), lines, on.EVENT_TYPES)
    assert divergence is None
    assert agreed == len(storm.seen) > 100
