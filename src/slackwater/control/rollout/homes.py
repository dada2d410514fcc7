"""Which instance holds which trajectory's prefix, as far as can be told from outside."""

from collections import OrderedDict
from dataclasses import dataclass

from slackwater.control.rollout.instances import InstanceRecord, Instances
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.model.ids import InstanceId, TrajectoryId, TurnId


@dataclass(slots=True)
class CacheHome:
    """`counted` tokens of a trajectory with more than one turn are in its instance's
    `homed_tokens`.

    The record is the instance itself, not its name: an instance that joins again has an empty
    cache.
    """

    record: InstanceRecord
    context_tokens: int
    seen_s: float
    turn: TurnId
    came_back: bool
    counted: int = 0

    def count(self, tokens: int) -> None:
        """Let the instance's total hold so many tokens of this trajectory."""
        self.record.load.homed_tokens += tokens - self.counted
        self.counted = tokens


class CacheHomes:
    """Least recently used first; forgotten after `lease_s`, or when there are too many."""

    def __init__(self, instances: Instances, lease_s: float, most: int) -> None:
        self._instances = instances
        self._lease_s = lease_s
        self._most = most
        self._homes: OrderedDict[TrajectoryId, CacheHome] = OrderedDict()

    def of(self, trajectory: TrajectoryId) -> tuple[InstanceId | None, int]:
        """The live instance that served the last turn, and the context it had then."""
        home = self._homes.get(trajectory)
        if home is None or not self._lives(home.record):
            return None, 0
        return home.record.spec.instance, home.context_tokens

    def remember(self, turn: LiveTurn, now_s: float) -> None:
        """The turn was sent to, or has ended on, its present instance."""
        assert turn.instance is not None
        trajectory = turn.spec.trajectory
        before = self._homes.pop(trajectory, None)
        came_back = False
        if before is not None:
            before.count(0)
            came_back = before.came_back or before.turn != turn.spec.turn
        record = self._instances.records[turn.instance]
        home = CacheHome(record, turn.context_tokens, now_s, turn.spec.turn, came_back)
        self._homes[trajectory] = home
        home.count(home.context_tokens if came_back else 0)
        if len(self._homes) > self._most:
            self._forget()

    def expire(self, now_s: float) -> None:
        """Forget trajectories that have not come back for long."""
        while self._homes:
            if next(iter(self._homes.values())).seen_s + self._lease_s > now_s:
                return
            self._forget()

    def check_integrity(self) -> None:
        """Every instance's total is the sum over the trajectories at home there."""
        totals = {id(record): 0 for record in self._instances}
        for home in self._homes.values():
            if id(home.record) in totals:
                totals[id(home.record)] += home.counted
        for record in self._instances:
            assert record.load.homed_tokens == totals[id(record)], "homes are counted wrong"

    def _lives(self, record: InstanceRecord) -> bool:
        return self._instances.records.get(record.spec.instance) is record

    def _forget(self) -> None:
        _, home = self._homes.popitem(last=False)
        home.count(0)
