"""Working sets: which trajectories have their prefix cached on which instance.

The end of a trajectory is inferred: one that pauses for longer than its job's trajectories usually
pause counts as ended.
"""

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from slackwater.control.rollout.instances import CacheHome, InstanceRecord, Instances
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.model.ids import InstanceId, JobId, TrajectoryId
from slackwater.policy.rollout.long_tail import TimeLeft
from slackwater.policy.rollout.routing import TurnNeed
from slackwater.policy.rollout.start_order import StartOrder, make_prompt_key
from slackwater.policy.rollout.step_time import StepTime
from slackwater.policy.rollout.working_set import ContextGrowth, empty_working_set

_JOBS = 256
_FORGET_AFTER_S = 300.0  # by then an engine has evicted a trajectory's cache
_MANY = 16_384  # of more, those of jobs whose trajectories do not return are forgotten sooner
# A paused trajectory is checked when it still lives with each of these probabilities.
_LIFE_PROBABILITIES = (0.75, 0.5, 0.25, 0.1)


class CacheHomes:
    """Trajectories' homes, least recently used first. A pause longer than usual for the job, at
    most `lease_s`, ends a trajectory.
    """

    def __init__(self, instances: Instances, lease_s: float, most: int) -> None:
        self._instances = instances
        self._lease_s = lease_s
        self._most = most
        self._homes: OrderedDict[TrajectoryId, CacheHome] = OrderedDict()
        self._growth: OrderedDict[JobId, ContextGrowth] = OrderedDict()
        self._due: list[tuple[float, TrajectoryId]] = []
        self._starts = StartOrder()
        self._step_time: StepTime | None = None
        self._longest_left_s: Mapping[JobId, float] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def need(self, turn: LiveTurn, now_s: float) -> TurnNeed:
        """The turn as routing policies see it."""
        spec = turn.spec
        home = self._homes.get(spec.trajectory)
        instance = self._instance_of(home)
        resident = instance is not None and home is not None and home.is_resident
        growth = self._growth.get(spec.job)
        return TurnNeed(
            spec.turn,
            spec.trajectory,
            turn.context_tokens,
            instance,
            resident,
            growth,
            turn.sequence,
            self._forecast_time_left(turn, now_s),
        )

    def forecast(self, longest_left_s: Mapping[JobId, float], step_time: StepTime | None) -> None:
        """Take a forecast of how long each job's longest trajectory still needs."""
        self._longest_left_s, self._step_time = longest_left_s, step_time

    def _forecast_time_left(self, turn: LiveTurn, now_s: float) -> TimeLeft | None:
        longest_s = self._longest_left_s.get(turn.spec.job)
        if longest_s is None or self._step_time is None:
            return None
        left_s = self.predict_left_s(turn, now_s)
        return None if left_s is None else TimeLeft(left_s, longest_s, self._step_time)

    def predict_left_s(self, turn: LiveTurn, now_s: float) -> float | None:
        """How much longer the turn's trajectory will take; None if that is unknown."""
        home = self._homes.get(turn.spec.trajectory)
        if home is None:
            return None
        age_s = 0.0 if home.record is None else now_s - home.began_s
        return self._starts.predict_left_s(home.prompt, age_s)

    def _instance_of(self, home: CacheHome | None) -> InstanceId | None:
        """The live instance that served the trajectory's last turn."""
        if home is None or home.record is None or not self._is_live(home.record):
            return None
        return home.record.spec.instance

    def has_home(self, turn: LiveTurn) -> bool:
        """Whether the turn's trajectory has been on an instance before."""
        home = self._homes.get(turn.spec.trajectory)
        return home is not None and home.record is not None

    def is_resident(self, turn: LiveTurn) -> bool:
        """Whether the turn's trajectory belongs to the working set of an instance."""
        home = self._homes.get(turn.spec.trajectory)
        return home is not None and home.is_resident

    def start_order(self, turns: Sequence[LiveTurn]) -> list[LiveTurn]:
        """First turns of trajectories, in the order in which they are to start."""
        homes = [self._homes.get(turn.spec.trajectory) for turn in turns]
        waiting = [
            (home.prompt, turn.waiting_since_s or 0.0)
            for home, turn in zip(homes, turns, strict=True)
            if home is not None
        ]
        if len(waiting) < len(turns):  # some were forgotten: there are too many
            return list(turns)
        return [turns[index] for index in self._starts.order(waiting)]

    def record_open(self, turn: LiveTurn, now_s: float) -> None:
        trajectory = turn.spec.trajectory
        home = self._homes.get(trajectory)
        if home is None:
            growth = self._growth_of(turn.spec.job)
            tokens = turn.prompt_tokens
            prompt = make_prompt_key(turn.spec.job, turn.spec.prompt)
            home = CacheHome(turn.sequence, prompt, growth, tokens, tokens)
            self._homes[trajectory] = home
            if len(self._homes) > self._most:
                self._homes.popitem(last=False)[1].leave()
        elif not home.open_turns and home.record is not None:
            returned = home.growth.usually_returns
            home.growth.record_return(now_s - home.seen_s)
            home.revive()
            if home.growth.usually_returns and not returned:
                self._count_all(home.growth, now_s)
        home.open_turns += 1

    def _count_all(self, growth: ContextGrowth, now_s: float) -> None:
        """Count a job's earlier trajectories once one of them has returned: they may, too."""
        for trajectory, home in self._homes.items():
            if home.growth is not growth or home.record is None or not self._is_live(home.record):
                continue
            home.revive()
            home.count()
            if not home.open_turns:
                home.stage = 0
                heapq.heappush(self._due, (now_s, trajectory))

    def record_dispatch(self, turn: LiveTurn, now_s: float) -> None:
        """The turn was dispatched to its present instance."""
        home = self._homes.get(turn.spec.trajectory)
        if home is None or turn.instance is None:
            return
        home.leave()
        if home.record is None:
            home.began_s = now_s
            self._starts.record(home.prompt, 0.0)
        home.record = self._instances.records[turn.instance]
        home.context_tokens = turn.context_tokens
        if home.growth.usually_returns:
            home.count()

    def record_close(self, turn: LiveTurn, now_s: float) -> None:
        """The turn ended, on its instance or in the queue."""
        trajectory = turn.spec.trajectory
        home = self._homes.get(trajectory)
        if home is None:
            return
        self._homes.move_to_end(trajectory)
        home.open_turns -= 1
        home.seen_s = now_s
        if turn.instance is not None:
            self._starts.record(home.prompt, now_s - home.began_s)
            context_tokens = turn.context_tokens
            home.growth.record_growth(home.before_tokens, context_tokens)
            home.context_tokens = home.before_tokens = context_tokens
            if home.growth.usually_returns:
                home.count()
                self._trim(home.record)
        if not home.open_turns and not home.growth.usually_returns:
            self._end(home)
        elif not home.open_turns:
            home.stage = 0
            heapq.heappush(self._due, (self._next_check_s(home), trajectory))

    def expire(self, now_s: float) -> list[InstanceRecord]:
        """Count trajectories less the longer they pause, until they count as ended; return the
        instances that have room now.
        """
        shrunk: list[InstanceRecord] = []
        while self._due and self._due[0][0] <= now_s:
            _, trajectory = heapq.heappop(self._due)
            home = self._homes.get(trajectory)
            if home is None or home.open_turns or home.ended:
                continue
            check_s = self._next_check_s(home)
            if check_s > now_s:  # it had a turn meanwhile, or the job's pauses got longer
                heapq.heappush(self._due, (check_s, trajectory))
                continue
            if home.is_resident and home.record is not None and self._is_live(home.record):
                shrunk.append(home.record)
                home.count(_LIFE_PROBABILITIES[home.stage])
            home.stage += 1
            if home.stage == len(_LIFE_PROBABILITIES):
                self._end(home)
            else:
                heapq.heappush(self._due, (max(self._next_check_s(home), now_s), trajectory))
        self._forget(now_s)
        return list(dict.fromkeys(shrunk))

    def _forget(self, now_s: float) -> None:
        """Drop trajectories that have had no turn for long, the least recently used first."""
        while self._homes:
            trajectory, home = next(iter(self._homes.items()))
            kept_s = max(self._lease_s, _FORGET_AFTER_S)
            if len(self._homes) > _MANY and not home.growth.usually_returns:
                kept_s = self._lease_s
            if home.seen_s >= now_s - kept_s:
                return
            if home.open_turns:
                home.seen_s = now_s
                self._homes.move_to_end(trajectory)
            else:
                home.leave()
                del self._homes[trajectory]

    def _next_check_s(self, home: CacheHome) -> float:
        return home.seen_s + home.growth.estimate_pause_s(
            _LIFE_PROBABILITIES[home.stage], self._lease_s
        )

    @staticmethod
    def _end(home: CacheHome) -> None:
        home.leave()
        if not home.ended and home.record is not None:
            home.ended = True
            home.growth.record_end(home.context_tokens)

    def _trim(self, record: InstanceRecord | None) -> None:
        """If contexts outgrew the cache, the youngest paused trajectories leave the working set."""
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
        """Raise AssertionError unless working sets are the sums over their trajectories."""
        residents = {id(record): empty_working_set() for record in self._instances}
        tokens = dict.fromkeys(residents, 0)
        for home in self._homes.values():
            if home.expected is not None and id(home.record) in tokens:
                residents[id(home.record)] += home.expected
                tokens[id(home.record)] += home.counted_tokens
        for record in self._instances:
            assert record.load.resident_tokens == tokens[id(record)], "homes are counted wrong"
            assert (record.load.expected_tokens == residents[id(record)]).all(), "homes grew wrong"

    def _is_live(self, record: InstanceRecord) -> bool:
        return self._instances.records.get(record.spec.instance) is record
