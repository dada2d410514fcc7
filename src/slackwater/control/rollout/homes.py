"""Which instance holds which trajectory's prefix, as far as can be told from outside."""

from collections import OrderedDict
from dataclasses import dataclass

from slackwater.control.rollout.fleet import Fleet
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.model.ids import InstanceId, TrajectoryId


@dataclass(slots=True)
class Home:
    """`counted` tokens are in the instance's `homed_tokens`: only a trajectory that has come back counts."""

    instance: InstanceId
    context_tokens: int
    seen_s: float
    turns: int
    counted: int = 0


class Homes:
    """Least recently used first; forgotten after `lease_s`, or when there are too many."""

    def __init__(self, fleet: Fleet, lease_s: float, most: int) -> None:
        self._fleet = fleet
        self._lease_s = lease_s
        self._most = most
        self._homes: OrderedDict[TrajectoryId, Home] = OrderedDict()

    def of(self, trajectory: TrajectoryId) -> tuple[InstanceId | None, int]:
        """The instance that served the last turn, and the context it then had."""
        home = self._homes.get(trajectory)
        return (None, 0) if home is None else (home.instance, home.context_tokens)

    def remember(self, turn: LiveTurn, now_s: float, *, sent: bool) -> None:
        """The turn was sent to, or has ended on, its present instance."""
        assert turn.instance is not None
        trajectory = turn.spec.trajectory
        before = self._homes.pop(trajectory, None)
        turns = (before.turns if before else 0) + sent
        if before is not None:
            self._count(before, 0)
        home = Home(turn.instance, turn.context_tokens, now_s, turns)
        self._homes[trajectory] = home
        self._count(home, home.context_tokens if turns > 1 else 0)
        if len(self._homes) > self._most:
            self._forget()

    def expire(self, now_s: float) -> None:
        """Forget trajectories that have not come back for long."""
        while self._homes:
            if next(iter(self._homes.values())).seen_s + self._lease_s > now_s:
                return
            self._forget()

    def _forget(self) -> None:
        _, home = self._homes.popitem(last=False)
        self._count(home, 0)

    def _count(self, home: Home, tokens: int) -> None:
        record = self._fleet.records.get(home.instance)
        if record is not None:
            record.load.homed_tokens = max(record.load.homed_tokens + tokens - home.counted, 0)
        home.counted = tokens
