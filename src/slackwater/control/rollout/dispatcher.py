"""The life of a turn: dispatched to an instance by the routing policy, or queued, until it ends."""

import heapq

from slackwater.control.rollout.commands import AbortTurn, CompleteTurn, DispatchTurn, FailTurn
from slackwater.control.rollout.demand import Demand
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.control.rollout.homes import CacheHomes
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.manager_state import ManagerState
from slackwater.control.rollout.turn_queue import TurnQueue, need_key
from slackwater.model.ids import TenantId
from slackwater.model.turn import AttemptId, FinishReason
from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.routing import WAIT, Destination, TurnNeed


class Dispatcher:
    """Owns attempts: which turn runs on which instance, by number."""

    def __init__(self, state: ManagerState) -> None:
        self._state = state
        self._settings = settings = state.settings
        self._instances = state.instances
        self.queue = TurnQueue()
        self.attempts: dict[int, LiveTurn] = {}
        self.next_attempt = 1
        self.owners: set[TenantId] = set()
        self.demand = Demand(state)
        self.homes = CacheHomes(
            state.instances, settings.home_lease_s, settings.remembered_trajectories
        )

    # ---- life ----
    def open(self, turn: LiveTurn) -> None:
        state, spec = self._state, turn.spec
        state.out.append(TurnOpened(state.now_s, spec.job, spec.base_model, turn.sequence))
        work = state.work[spec.job]
        work.live_turns += 1
        work.base_models.add(spec.base_model)
        self.demand.record_open(turn)
        self.homes.record_open(turn, state.now_s)
        state.turns[spec.turn] = turn
        state.counters.submitted += 1
        heapq.heappush(state.deadlines, (turn.deadline_s, turn.sequence, spec.turn))

    def complete(self, turn: LiveTurn, reason: FinishReason) -> None:
        """End a complete turn, and fill the room that it leaves."""
        state, spec, tokens = self._state, turn.spec, turn.tokens
        state.counters.completed += 1
        state.lengths.observe(len(tokens))
        state.work[spec.job].done_tokens += len(tokens)
        if turn.instance in state.instances.records:
            source = spec.base_model, state.instances.records[turn.instance].spec.kind
            state.counters.tokens[source] += len(tokens)
        state.out.append(
            CompleteTurn(
                spec.turn,
                tokens.tolist(),
                turn.logprobs.tolist(),
                reason,
                turn.version,
                turn.moves,
                turn.topk or (),
                turn.prompt_logprobs,
                turn.prompt_topk,
                turn.prompt_targets,
                turn.prompt_alternatives,
            )
        )
        self.close(turn, completed=True)

    def fail(self, turn: LiveTurn, error: str) -> None:
        """Fail one turn."""
        self._state.counters.failed += 1
        self._state.out.append(FailTurn(turn.spec.turn, error))
        self.close(turn)

    def stop(self, turn: LiveTurn) -> None:
        """Abort the turn on its instance, if it runs; `close` follows."""
        if turn.attempt is not None and turn.instance is not None:
            self._state.out.append(AbortTurn(turn.instance, turn.attempt))

    def close(self, turn: LiveTurn, *, completed: bool = False) -> None:
        """Remove the turn from all state, and fill the room that it leaves."""
        state, spec = self._state, turn.spec
        now_s, turns = state.now_s, state.turns
        del turns[spec.turn]
        if len(state.deadlines) > 2 * len(turns) + 64:  # most belong to ended turns
            state.deadlines[:] = [row for row in state.deadlines if row[2] in turns]
            heapq.heapify(state.deadlines)
        work = state.work[spec.job]
        work.live_turns -= 1
        work.closed_turns += 1
        work.closed_s = now_s
        state.forget_work(spec.job)
        self.queue.remove(turn)
        self.homes.record_close(turn, now_s)
        record = self.detach(turn)
        state.out.append(
            TurnClosed(
                now_s,
                spec.job,
                spec.base_model,
                prompt_tokens=turn.prompt_tokens,
                tokens=len(turn.tokens),
                device_s=turn.device_s,
                waited_s=turn.total_queued_s(now_s),
                completed=completed,
                sequence=turn.sequence,
            )
        )
        self.demand.record_close(turn)
        if record is not None:
            self.fill(record)

    def resume(self, turn: LiveTurn) -> None:
        """Dispatch again a turn that lost its instance, unless its tokens complete it."""
        reason = turn.end_reason()
        if reason is not None:
            self.complete(turn, reason)
            return
        self._state.counters.moved += 1
        self.place(turn, first=True)

    def room_changed(self, record: InstanceRecord) -> None:
        """Fill an instance that may accept more turns than before."""
        record.refresh()
        self._instances.invalidate()
        self.fill(record)

    # ---- dispatch ----
    def place(self, turn: LiveTurn, *, first: bool = False) -> None:
        """Dispatch the turn where the policy says, or queue it."""
        destination = WAIT
        if self._instances.gates.takes(turn):
            loads = self._view_of_owner(turn, self._candidates(turn))
            destination = self._settings.routing.place(self._need(turn), loads)
        if destination.instance is not None:
            self._send(turn, self._instances.records[destination.instance])
        else:
            self._wait(turn, destination, first)

    def _wait(self, turn: LiveTurn, placement: Destination, first: bool) -> None:
        turn.waiting_since_s = self._state.now_s
        started = self._settings.routing.started_first and self.homes.has_home(turn)
        self.queue.add(turn, first=first, started=started, bound_to=placement.bound_to)

    def fill(self, record: InstanceRecord) -> None:
        """Dispatch queued turns to an instance that has room again."""
        while len(self.queue) and record.load.accepting:
            turn = self._next_for(record)
            if turn is None:
                return
            self.queue.remove(turn)
            self._send(turn, record)

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
        return self._settings.routing.can_take(self._need(turn), load)

    def _need(self, turn: LiveTurn) -> TurnNeed:
        return self.homes.need(turn, self._state.now_s)

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

    def move(self, turn: LiveTurn, target: InstanceRecord) -> None:
        """Stop the turn where it runs and continue it on `target`."""
        self.recall(turn)
        self._send(turn, target)

    def exchange(self, long: LiveTurn, short: LiveTurn) -> None:
        """Give a waiting or running turn the place of a running one, which then waits as a new one
        does.
        """
        assert short.instance is not None
        record = self._instances.records[short.instance]
        self.recall(short)
        short.waiting_since_s = self._state.now_s
        self.queue.add(short, first=True)
        if long.instance is None:
            self.queue.remove(long)
        else:
            self.recall(long)
        self._send(long, record)

    def movable(self, turn: LiveTurn, target: InstanceRecord) -> bool:
        """Whether `target` could continue the turn."""
        return target.load.accepting and self._can_run(turn, target)

    def recall(self, turn: LiveTurn) -> None:
        """Stop the turn's attempt on an instance that stays."""
        assert turn.instance is not None
        assert turn.attempt is not None
        self._state.out.append(AbortTurn(turn.instance, turn.attempt))
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
            turn.device_s += record.clock.read(self._state.now_s, -1) - turn.device_clock_s
        turn.attempt = None
        turn.instance = None
        return record

    def _candidates(self, turn: LiveTurn) -> list[InstanceLoad]:
        eligible = self._instances.eligible(need_key(turn))
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

    def _send(self, turn: LiveTurn, record: InstanceRecord) -> None:
        version = record.version_for(turn)
        assert version is not None, f"{turn.spec.turn} dispatched where its weights are not"
        attempt, spec = AttemptId(self.next_attempt), turn.spec
        tokens, logprobs, now_s = turn.tokens, turn.logprobs, self._state.now_s
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
        self._state.out.append(
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
