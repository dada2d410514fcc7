"""Carries out the balancing policy: picks the turns to move, within a rate limit."""

from slackwater.control.rollout.instances import InstanceRecord
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.manager_state import ManagerState, Out
from slackwater.control.rollout.turn_queue import NeedKey, need_key
from slackwater.policy.rollout.balancing import EngineKnowledge, TurnMove


class Rebalancer:
    """Asks the policy every `balance_every_s`."""

    def __init__(self, books: ManagerState) -> None:
        self._books = books
        self._last_s = float("-inf")

    def watch(self, now_s: float, out: Out) -> None:
        """Balance if it is time and there is anything to balance."""
        books = self._books
        if now_s - self._last_s < books.settings.balance_every_s or not books.dispatcher.attempts:
            return
        self._last_s = now_s
        known = EngineKnowledge(books.profile.plateau(), books.step_time.model)
        for need in sorted({need_key(turn) for turn in books.dispatcher.attempts.values()}):
            # Only instances that can take each other's turns: one that is idle for want of a
            # model's or a version's weights is no place to move to, and must not hide those that
            # are.
            loads = books.instances.eligible(need)
            if len(loads) > 1:
                for move in books.settings.balancing.moves(loads, known):
                    self._execute(move, need, now_s, out)

    def _execute(self, move: TurnMove, need: NeedKey, now_s: float, out: Out) -> None:
        books = self._books
        source = books.instances.records.get(move.source)
        target = books.instances.records.get(move.target)
        if source is None or target is None:
            return
        for turn in self._chosen(source, target, move, need, now_s):
            books.counters.moved += 1
            books.dispatcher.move(turn, target, now_s, out)
        books.dispatcher.fill(source, now_s, out)

    def _chosen(
        self,
        source: InstanceRecord,
        target: InstanceRecord,
        move: TurnMove,
        need: NeedKey,
        now_s: float,
    ) -> list[LiveTurn]:
        """Pending turns are the last sent; of running ones, the cheapest to prefill again.

        A trajectory of the source's working set stays: its next turns would be prefilled, too.
        """
        resident = self._books.dispatcher.homes.resident
        held = reversed(source.attempts.values())
        candidates = [turn for turn in held if need_key(turn) == need and not resident(turn)]
        if move.running:
            rested_s = now_s - self._books.settings.move_rest_s
            candidates = [turn for turn in candidates if turn.moves == 0 or turn.sent_s <= rested_s]
            candidates.sort(key=lambda turn: turn.context_tokens)
        chosen: list[LiveTurn] = []
        room_tokens = target.load.kv_tokens - target.load.kv_load_tokens
        for turn in candidates:
            if len(chosen) == move.count:
                break
            if turn.context_tokens <= room_tokens and self._books.dispatcher.movable(turn, target):
                chosen.append(turn)
                room_tokens -= turn.context_tokens
        return chosen
