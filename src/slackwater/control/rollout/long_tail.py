"""Forecasts the end of each job's longest trajectory, and gives long ones the own instances."""

from collections import defaultdict

from slackwater.control.rollout.dispatcher import Dispatcher
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.manager_state import ManagerState
from slackwater.control.rollout.turn_queue import NeedKey, need_key
from slackwater.model.ids import JobId, TenantId
from slackwater.policy.rollout.long_tail import SHORT_CONTEXT_TOKENS, pair_exchanges

_Timed = list[tuple[float, LiveTurn]]
# Only turns of one owner with equal needs take each other's places.
_Peers = tuple[NeedKey, TenantId]


class LongTail:
    """Does nothing in fleets of own instances alone."""

    def __init__(self, state: ManagerState, dispatcher: Dispatcher) -> None:
        self._state = state
        self._dispatcher = dispatcher

    def watch(self) -> None:
        """Forecast anew, and exchange turns."""
        state, homes = self._state, self._dispatcher.homes
        longest_s: dict[JobId, float] = {}
        candidates: defaultdict[_Peers, tuple[_Timed, _Timed]] = defaultdict(lambda: ([], []))
        if any(not record.load.owned for record in state.instances):
            for turn in state.turns.values():  # hot: one pass over thousands of turns a second
                left_s = homes.predict_left_s(turn, state.now_s)
                if left_s is None:
                    continue
                longest_s[turn.spec.job] = max(left_s, longest_s.get(turn.spec.job, 0.0))
                if (side := self._side_of(turn)) is not None:
                    candidates[need_key(turn), turn.spec.owner][side].append((left_s, turn))
        homes.forecast(longest_s, state.step_time.model)
        for long, short in candidates.values():
            for one, other in pair_exchanges(long, short):
                self._exchange(one, other)

    def _side_of(self, turn: LiveTurn) -> int | None:
        """0 if the turn may get an own instance, 1 if it may leave one."""
        if turn.instance is None:
            return None if self._dispatcher.homes.has_home(turn) else 0
        if not self._state.instances.records[turn.instance].load.owned:
            return 0
        has_just_begun = turn.moves == 0 and turn.context_tokens <= SHORT_CONTEXT_TOKENS
        return 1 if has_just_begun else None

    def _exchange(self, long: LiveTurn, short: LiveTurn) -> None:
        records = self._state.instances.records
        source = None if long.instance is None else records[long.instance]
        assert short.instance is not None
        if not self._dispatcher.movable(long, records[short.instance]):
            return
        self._state.counters.moved += 1
        self._dispatcher.exchange(long, short)
        if source is not None:
            self._dispatcher.fill(source)
