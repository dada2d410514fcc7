"""Forecasts the end of each job's longest trajectory, and gives long ones the own instances."""

from collections import defaultdict

from slackwater.control.rollout.dispatcher import Dispatcher
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.manager_state import ManagerState
from slackwater.control.rollout.turn_queue import NeedKey, need_key
from slackwater.model.ids import TenantId
from slackwater.policy.rollout.long_tail import SHORT_CONTEXT_TOKENS, pair_exchanges

_Timed = list[tuple[float, LiveTurn]]


class LongTail:
    """Does nothing in fleets of own instances alone."""

    def __init__(self, state: ManagerState, dispatcher: Dispatcher) -> None:
        self._state = state
        self._dispatcher = dispatcher

    def watch(self) -> None:
        """Forecast anew, and exchange turns."""
        state, homes = self._state, self._dispatcher.homes
        if all(record.load.owned for record in state.instances):
            homes.forecast((), None, state.now_s)
            return
        homes.forecast(state.turns.values(), state.step_time.model, state.now_s)
        # Only turns of one owner with equal needs take each other's places.
        for long, short in self._candidates().values():
            for one, other in pair_exchanges(long, short):
                self._exchange(one, other)

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

    def _candidates(self) -> dict[tuple[NeedKey, TenantId], tuple[_Timed, _Timed]]:
        """Turns that may get an own instance, and turns that may leave one, by need and owner, each
        with the time that its trajectory will take.
        """
        found: defaultdict[tuple[NeedKey, TenantId], tuple[_Timed, _Timed]]
        found = defaultdict(lambda: ([], []))
        records, dispatcher = self._state.instances.records, self._dispatcher
        for turn in self._state.turns.values():
            left_s = dispatcher.homes.predict_left_s(turn, self._state.now_s)
            if left_s is None:
                continue
            long, short = found[need_key(turn), turn.spec.owner]
            if turn.instance is None:
                if not dispatcher.homes.has_home(turn):
                    long.append((left_s, turn))
            elif not records[turn.instance].load.owned:
                long.append((left_s, turn))
            elif turn.moves == 0 and turn.context_tokens <= SHORT_CONTEXT_TOKENS:
                short.append((left_s, turn))
        return found
