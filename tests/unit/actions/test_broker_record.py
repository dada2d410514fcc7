"""What the broker saw and did can be recorded, and replaying the record gives the same commands."""

from benchmarks.actions.simulated.storm import Storm
from slackwater.control.actions import events as on
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.record import record_line, replay


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
    broker = ActionBroker(storm.settings)
    lines = [record_line(event, broker.handle(event)) for event in storm.seen]
    agreed, divergence = replay(ActionBroker(storm.settings), lines, on.EVENT_TYPES)
    assert divergence is None
    assert agreed == len(storm.seen) > 100
