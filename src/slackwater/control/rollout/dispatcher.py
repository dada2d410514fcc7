"""Dispatches turns to instances by the routing policy, and queues those that must wait."""

from slackwater.control.rollout.commands import AbortTurn, DispatchTurn, RolloutCommand
from slackwater.control.rollout.homes import CacheHomes
from slackwater.control.rollout.instances import InstanceRecord, Instances
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.rollout.turn_queue import NeedKey, TurnQueue, need_key
from slackwater.model.ids import TenantId
from slackwater.model.turn import AttemptId
from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.routing import WAIT, Destination


class Dispatcher:
    """Owns attempts: which turn runs on which instance, by number. Methods append to `out`."""

    def __init__(self, settings: RolloutSettings, instances: Instances) -> None:
        self._settings = settings
        self._instances = instances
        self.queue = TurnQueue()
        self.attempts: dict[int, LiveTurn] = {}
        self.next_attempt = 1
        self.owners: set[TenantId] = set()
        self.now_s = 0.0  # of the current event
        self.homes = CacheHomes(instances, settings.home_lease_s, settings.remembered_trajectories)

    def place(
        self, turn: LiveTurn, now_s: float, out: list[RolloutCommand], *, first: bool = False
    ) -> bool:
        """Dispatch the turn where the policy says, or queue it; return whether it left."""
        need = self.homes.need(turn)
        if not self._instances.gates.takes(turn):
            self._wait(turn, WAIT, now_s, first)
            return False
        key = need_key(turn)
        placement = self._settings.routing.place(
            need, self._view_of_owner(turn, self._candidates(turn, key))
        )
        if placement.instance is not None:
            self._send(turn, self._instances.records[placement.instance], now_s, out)
            return True
        self._wait(turn, placement, now_s, first)
        return False

    def _wait(self, turn: LiveTurn, placement: Destination, now_s: float, first: bool) -> None:
        turn.waiting_since_s = now_s
        started = self._settings.routing.started_first and self.homes.has_home(turn)
        self.queue.add(turn, first=first, started=started, bound_to=placement.bound_to)

    def fill(self, record: InstanceRecord, now_s: float, out: list[RolloutCommand]) -> None:
        """Dispatch queued turns to an instance that has room again."""
        while len(self.queue) and record.load.accepting:
            turn = self._next_for(record)
            if turn is None:
                return
            self.queue.remove(turn)
            self._send(turn, record, now_s, out)

    def order_starts(self) -> None:
        """Put queued turns of new trajectories in the order in which they are to start."""
        if self._settings.routing.started_first:
            self.queue.reorder_new(self.homes.start_order)

    def _next_for(self, record: InstanceRecord) -> LiveTurn | None:
        """The next queued turn for an instance: of the owner with the fewest turns there; of its
        turns one with its prefix there, then one of a started trajectory, then a new one; each the
        oldest.
        """
        able = [
            (record.owners[turn.spec.owner], 1 + (not started), turn.sequence, turn)
            for started, turn in self.queue.heads()
            if self._fits(turn, record)
        ]
        warm = self.queue.first_bound_to(record.spec.instance)
        if warm is not None and self._fits(warm, record):
            able.append((record.owners[warm.spec.owner], 0, warm.sequence, warm))
        return min(able, key=lambda row: row[:3])[3] if able else None

    def _fits(self, turn: LiveTurn, record: InstanceRecord) -> bool:
        if not self._can_run(turn, record):
            return False
        (load,) = self._view_of_owner(turn, [record.load])
        return self._settings.routing.can_take(self.homes.need(turn), load)

    def _view_of_owner(self, turn: LiveTurn, loads: list[InstanceLoad]) -> list[InstanceLoad]:
        """Loads as the turn's owner may use them: it leaves a share of each instance to others."""
        share = self._settings.kept_for_others
        if not share or len(self.owners) < 2:
            return loads
        records = self._instances.records
        return [records[load.instance].load_for(turn.spec.owner, share) for load in loads]

    def _can_run(self, turn: LiveTurn, record: InstanceRecord) -> bool:
        return (
            record.spec.serves(turn.spec.job, turn.spec.base_model)
            and self._instances.gates.allows(turn, record.spec)
            and (record.spec.exact_continuation or not turn.must_continue)
            and record.version_for(turn) is not None
            and turn.context_tokens < record.spec.max_context_tokens
        )

    def move(
        self, turn: LiveTurn, target: InstanceRecord, now_s: float, out: list[RolloutCommand]
    ) -> None:
        """Stop the turn where it runs and continue it on `target`."""
        self.recall(turn, out)
        self._send(turn, target, now_s, out)

    def movable(self, turn: LiveTurn, target: InstanceRecord) -> bool:
        """Whether `target` could continue the turn."""
        return target.load.accepting and self._can_run(turn, target)

    def recall(self, turn: LiveTurn, out: list[RolloutCommand]) -> None:
        """Stop the turn's attempt on an instance that stays."""
        assert turn.instance is not None
        assert turn.attempt is not None
        out.append(AbortTurn(turn.instance, turn.attempt))
        load = self._instances.records[turn.instance].load
        if load.waiting:
            load.waiting -= 1
        self.detach(turn)
        turn.moves += 1

    def detach(self, turn: LiveTurn) -> InstanceRecord | None:
        """Undo the turn's assignment; return its instance, if it is still there."""
        if turn.attempt is None:
            return None
        assert turn.instance is not None
        self.attempts.pop(turn.attempt)
        turn.leave_buffer()
        record = self._instances.records.get(turn.instance)
        if record is not None:
            del record.attempts[turn.attempt]
            record.owners[turn.spec.owner] -= 1
            record.owned_tokens[turn.spec.owner] -= turn.sent_context
            record.load.in_flight -= 1
            record.load.waiting = min(record.load.waiting, record.load.in_flight)
            record.load.kv_load_tokens = max(record.load.kv_load_tokens - turn.sent_context, 0)
            turn.device_s += record.clock.read(self.now_s, -1) - turn.device_clock_s
        turn.attempt = None
        turn.instance = None
        return record

    def _candidates(self, turn: LiveTurn, key: NeedKey) -> list[InstanceLoad]:
        eligible = self._instances.eligible(key)
        context, exact = turn.context_tokens, turn.must_continue
        if (
            context < self._instances.shortest_context
            and turn.avoided_instance is None
            and not exact
        ):
            return eligible
        records = self._instances.records
        return [
            load
            for load in eligible
            if context < load.max_context_tokens
            and load.instance != turn.avoided_instance
            and (not exact or records[load.instance].spec.exact_continuation)
        ]

    def _send(
        self, turn: LiveTurn, record: InstanceRecord, now_s: float, out: list[RolloutCommand]
    ) -> None:
        version = record.version_for(turn)
        assert version is not None, f"{turn.spec.turn} dispatched where its weights are not"
        attempt, spec = AttemptId(self.next_attempt), turn.spec
        tokens, logprobs = turn.tokens, turn.logprobs
        self.next_attempt += 1
        turn.inexact |= not record.spec.exact_continuation
        turn.attempt, turn.instance, turn.version = attempt, record.spec.instance, version
        turn.base_tokens = len(tokens)
        turn.sent_context = context = turn.context_tokens
        turn.sent_s = now_s
        turn.earlier_queued_s = turn.total_queued_s(now_s)
        turn.waiting_since_s = None
        turn.device_clock_s = record.clock.read(now_s, 1)
        self.attempts[attempt] = turn
        record.attempts[attempt] = turn
        record.owners[spec.owner] += 1
        record.owned_tokens[spec.owner] += context
        load = record.load
        if load.in_flight == 0:
            record.progress_s = now_s
        load.in_flight += 1
        load.kv_load_tokens += context
        self.homes.record_dispatch(turn, now_s)
        out.append(
            DispatchTurn(
                record.spec.instance,
                attempt,
                spec.turn,
                version,
                spec.prompt,
                tokens.tolist(),
                spec.sampling,
                turn.wants_prompt_scores,
                spec.owner,
                logprobs.tolist(),
                spec.stream,
            )
        )
