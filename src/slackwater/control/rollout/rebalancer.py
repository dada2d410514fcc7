"""Executes the balancing policy: picks the turns to move, within a rate limit."""

from slackwater.control.rollout.dispatcher import Dispatcher
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.manager_state import ManagerState
from slackwater.control.rollout.turn_queue import NeedKey, need_key
from slackwater.policy.rollout.balancing import EngineKnowledge, TurnMove


class Rebalancer:
    """Asks the policy every `balance_every_s`."""

    def __init__(self, state: ManagerState, dispatcher: Dispatcher) -> None:
        self._state = state
        self._dispatcher = dispatcher
        self._last_s = float("-inf")

    def watch(self) -> None:
        """Balance if it is due and turns run."""
        state = self._state
        rested_s = state.now_s - self._last_s
        if rested_s < state.settings.balance_every_s or not self._dispatcher.attempts:
            return
        self._last_s = state.now_s
        known = EngineKnowledge(state.profile.plateau(), state.step_time.model)
        for need in sorted({need_key(turn) for turn in self._dispatcher.attempts.values()}):
            # Compare only instances that can take each other's turns: one that is idle because it
            # lacks the weights would else look like the best target and hide the usable ones.
            loads = state.instances.eligible(need)
            if len(loads) > 1:
                for move in state.settings.balancing.plan_moves(loads, known):
                    self._execute(move, need)

    def _execute(self, move: TurnMove, need: NeedKey) -> None:
        state = self._state
        source = state.instances.records.get(move.source)
        target = state.instances.records.get(move.target)
        if source is None or target is None:
            return
        for turn in self._pick_turns(source, target, move, need):
            state.counters.moved += 1
            self._dispatcher.move(turn, target)
        self._dispatcher.fill(source)

    def _pick_turns(
        self, source: InstanceRecord, target: InstanceRecord, move: TurnMove, need: NeedKey
    ) -> list[LiveTurn]:
        """Of pending turns the last dispatched, of running ones the cheapest to prefill again.

        Trajectories of the source's working set stay: their next turns would be prefilled, too.
        """
        resident = self._dispatcher.homes.is_resident
        newest_first = reversed(source.attempts.values())
        candidates = [
            turn for turn in newest_first if need_key(turn) == need and not resident(turn)
        ]
        if move.running:
            rested_s = self._state.now_s - self._state.settings.move_rest_s
            candidates = [turn for turn in candidates if turn.moves == 0 or turn.sent_s <= rested_s]
            candidates.sort(key=lambda turn: turn.context_tokens)
        chosen: list[LiveTurn] = []
        room_tokens = target.load.kv_tokens - target.load.kv_load_tokens
        for turn in candidates:
            if len(chosen) == move.count:
                break
            if turn.context_tokens <= room_tokens and self._dispatcher.movable(turn, target):
                chosen.append(turn)
                room_tokens -= turn.context_tokens
        return chosen
