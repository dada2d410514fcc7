"""Working sets: which trajectories hold their prefix on which instance, and which have ended.

Both are told from outside: a trajectory that has paused for longer than its job's trajectories
pause is taken to have ended.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from slackwater.control.rollout.instances import InstanceRecord, Instances
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.model.ids import InstanceId, JobId, TrajectoryId
from slackwater.policy.rollout.routing import TurnNeed
from slackwater.policy.rollout.working_set import ContextGrowth, Tokens, nothing_expected

_JOBS = 256
_KEPT_S = 300.0  # by then an engine has long given a trajectory's cache to others
_ALIVE = (0.75, 0.5, 0.25, 0.1)  # how likely a paused trajectory still lives, looked at in turn


@dataclass(slots=True)
class CacheHome:
    """A trajectory that has had a turn, where it ran last, and what it counts there.

    The record is the instance itself, not its name: an instance that joins again has an empty
    cache. `number` counts trajectories as they came. `open_turns` were submitted and have not
    ended.
    """

    number: int
    growth: ContextGrowth
    context_tokens: int
    before_tokens: int
    open_turns: int = 0
    record: InstanceRecord | None = None
    seen_s: float = 0.0
    ended: bool = False
    looked: int = 0
    counted: int = 0
    expected: Tokens | None = None

    @property
    def resident(self) -> bool:
        """In the working set of its instance."""
        return self.expected is not None

    def count(self, alive: float = 1.0) -> None:
        """Hold a place in the instance's working set, as far as it lives."""
        assert self.record is not None
        self.leave()
        load = self.record.load
        self.expected = self.growth.expected(self.context_tokens, alive)
        self.counted = int(self.expected[0, 0])
        self.record.residents[self.number] = self
        load.residents += 1
        load.resident_tokens += self.counted
        load.expected_tokens += self.expected

    def revive(self) -> None:
        """It has not ended, as it was taken to have."""
        if self.ended:
            self.ended = False
            self.growth.revived(self.context_tokens)

    def leave(self) -> None:
        """Give the place up."""
        if self.record is None or self.expected is None:
            return
        load = self.record.load
        del self.record.residents[self.number]
        load.residents -= 1
        load.resident_tokens -= self.counted
        load.expected_tokens -= self.expected
        self.counted, self.expected = 0, None


class CacheHomes:
    """Least recently used first; a pause longer than a job's lease, at most `lease_s`, ends one."""

    def __init__(self, instances: Instances, lease_s: float, most: int) -> None:
        self._instances = instances
        self._lease_s = lease_s
        self._most = most
        self._homes: OrderedDict[TrajectoryId, CacheHome] = OrderedDict()
        self._growth: OrderedDict[JobId, ContextGrowth] = OrderedDict()
        self._due: list[tuple[float, TrajectoryId]] = []

    def __len__(self) -> int:
        return len(self._homes)

    def need(self, turn: LiveTurn) -> TurnNeed:
        """What routing may know of the turn."""
        spec = turn.spec
        home = self._homes.get(spec.trajectory)
        instance = self.instance_of(spec.trajectory)
        resident = instance is not None and home is not None and home.resident
        growth = self._growth.get(spec.job)
        named = spec.turn, spec.trajectory
        return TurnNeed(*named, turn.context_tokens, instance, resident, growth, turn.sequence)

    def instance_of(self, trajectory: TrajectoryId) -> InstanceId | None:
        """The live instance that served its last turn."""
        home = self._homes.get(trajectory)
        if home is None or home.record is None or not self._lives(home.record):
            return None
        return home.record.spec.instance

    def started(self, turn: LiveTurn) -> bool:
        """Whether the turn's trajectory has been on an instance before."""
        home = self._homes.get(turn.spec.trajectory)
        return home is not None and home.record is not None

    def resident(self, turn: LiveTurn) -> bool:
        """Whether the turn's trajectory belongs to the working set of an instance."""
        home = self._homes.get(turn.spec.trajectory)
        return home is not None and home.resident

    def opened(self, turn: LiveTurn, now_s: float) -> None:
        trajectory = turn.spec.trajectory
        home = self._homes.get(trajectory)
        if home is None:
            growth = self._growth_of(turn.spec.job)
            prompt_tokens = len(turn.spec.prompt)
            home = CacheHome(turn.sequence, growth, prompt_tokens, prompt_tokens)
            self._homes[trajectory] = home
            if len(self._homes) > self._most:
                self._homes.popitem(last=False)[1].leave()
        elif not home.open_turns and home.record is not None:
            returned = home.growth.returns
            home.growth.returned(now_s - home.seen_s)
            home.revive()
            if home.growth.returns and not returned:
                self._count_all(home.growth, now_s)
        home.open_turns += 1

    def _count_all(self, growth: ContextGrowth, now_s: float) -> None:
        """A job turns out to have trajectories that return: those seen so far may, too."""
        for trajectory, home in self._homes.items():
            if home.growth is not growth or home.record is None or not self._lives(home.record):
                continue
            home.revive()
            home.count()
            if not home.open_turns:
                home.looked = 0
                heapq.heappush(self._due, (now_s, trajectory))

    def sent(self, turn: LiveTurn) -> None:
        """The turn goes to its present instance."""
        home = self._homes.get(turn.spec.trajectory)
        if home is None or turn.instance is None:
            return
        home.leave()
        home.record = self._instances.records[turn.instance]
        home.context_tokens = turn.context_tokens
        if home.growth.returns:
            home.count()

    def closed(self, turn: LiveTurn, now_s: float) -> None:
        """The turn has ended, on its instance or while it waited."""
        trajectory = turn.spec.trajectory
        home = self._homes.get(trajectory)
        if home is None:
            return
        self._homes.move_to_end(trajectory)
        home.open_turns -= 1
        home.seen_s = now_s
        if turn.instance is not None:
            home.growth.grew(home.before_tokens, turn.context_tokens)
            home.context_tokens = home.before_tokens = turn.context_tokens
            if home.growth.returns:
                home.count()
                self._trim(home.record)
        if not home.open_turns and not home.growth.returns:
            self._end(home)
        elif not home.open_turns:
            home.looked = 0
            heapq.heappush(self._due, (self._look_s(home), trajectory))

    def expire(self, now_s: float) -> list[InstanceRecord]:
        """The longer a trajectory pauses, the less it counts, until it is taken to have ended;
        where that leaves room.
        """
        left: list[InstanceRecord] = []
        while self._due and self._due[0][0] <= now_s:
            _, trajectory = heapq.heappop(self._due)
            home = self._homes.get(trajectory)
            if home is None or home.open_turns or home.ended:
                continue
            look_s = self._look_s(home)
            if look_s > now_s:  # it came back meanwhile, or pauses have turned out longer
                heapq.heappush(self._due, (look_s, trajectory))
                continue
            if home.resident and home.record is not None and self._lives(home.record):
                left.append(home.record)
                home.count(_ALIVE[home.looked])
            home.looked += 1
            if home.looked == len(_ALIVE):
                self._end(home)
            else:
                heapq.heappush(self._due, (max(self._look_s(home), now_s), trajectory))
        self._forget(now_s - max(self._lease_s, _KEPT_S))
        return list(dict.fromkeys(left))

    def _forget(self, before_s: float) -> None:
        """Drop trajectories that have had no turn since then."""
        while self._homes:
            trajectory, home = next(iter(self._homes.items()))
            if home.open_turns:
                self._homes.move_to_end(trajectory)
                return
            if home.seen_s >= before_s:
                return
            home.leave()
            del self._homes[trajectory]

    def _look_s(self, home: CacheHome) -> float:
        return home.seen_s + home.growth.pause_s(_ALIVE[home.looked], self._lease_s)

    @staticmethod
    def _end(home: CacheHome) -> None:
        home.leave()
        if not home.ended and home.record is not None:
            home.ended = True
            home.growth.ended(home.context_tokens)

    def _trim(self, record: InstanceRecord | None) -> None:
        """Contexts outgrew the cache: the youngest that pause leave the working set."""
        if record is None or record.load.resident_tokens <= record.load.kv_tokens:
            return
        for _, home in sorted(record.residents.items(), reverse=True):
            if not home.open_turns:
                home.leave()
                if record.load.resident_tokens <= record.load.kv_tokens:
                    return

    def _growth_of(self, job: JobId) -> ContextGrowth:
        growth = self._growth.get(job)
        if growth is None:
            growth = self._growth[job] = ContextGrowth(self._instances.longest_context)
            if len(self._growth) > _JOBS:
                self._growth.popitem(last=False)
        self._growth.move_to_end(job)
        return growth

    def check_integrity(self) -> None:
        """Every instance's working set is the sum over the trajectories that live there."""
        residents = {id(record): nothing_expected() for record in self._instances}
        tokens = dict.fromkeys(residents, 0)
        for home in self._homes.values():
            if home.expected is not None and id(home.record) in tokens:
                residents[id(home.record)] += home.expected
                tokens[id(home.record)] += home.counted
        for record in self._instances:
            assert record.load.resident_tokens == tokens[id(record)], "homes are counted wrong"
            assert (record.load.expected_tokens == residents[id(record)]).all(), "homes grew wrong"

    def _lives(self, record: InstanceRecord) -> bool:
        return self._instances.records.get(record.spec.instance) is record
