"""The rollout manager: one controller for every kind of instance.

    events -> manager.handle(event) -> commands

It owns every turn's tokens: `Ownership` checks what instances report about turns. Other parts:
`dispatcher` (which instance runs a turn, and how a turn ends), `membership` (instances that join
and leave), `rebalancer` (moves), `seeding` (how long training nodes roll out themselves).
"""

import heapq
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from slackwater.control.rollout import events
from slackwater.control.rollout.commands import AppendTokens, RolloutCommand, StreamTokens
from slackwater.control.rollout.dispatcher import Dispatcher
from slackwater.control.rollout.integrity import check_state
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.long_tail import LongTail
from slackwater.control.rollout.manager_state import ManagerState
from slackwater.control.rollout.membership import Membership
from slackwater.control.rollout.rebalancer import Rebalancer
from slackwater.control.rollout.seeding import SEEDING, Seeding
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import InstanceId, JobId, TurnId
from slackwater.model.turn import FinishReason

WATCH = "rollout-watch"
_TOKEN_IDS = 2**32


class RolloutManager:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self, settings: RolloutSettings | None = None) -> None:
        self.state = ManagerState(settings or RolloutSettings())
        self.dispatcher = Dispatcher(self.state)
        self._membership = Membership(self.state, self.dispatcher)
        self._ownership = Ownership(self.state, self.dispatcher, self._membership)
        self._rebalancer = Rebalancer(self.state, self.dispatcher)
        self._long_tail = LongTail(self.state, self.dispatcher)
        self._seeding = Seeding(self.state, self._membership)
        self._watching = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.TurnSubmitted: self._submit,
            events.TurnCancelled: self._cancel,
            events.TokensArrived: self._ownership.tokens_arrived,
            events.PromptScored: self._ownership.prompt_scored,
            events.TurnEnded: self._ownership.turn_ended,
            events.TurnRefused: self._ownership.turn_refused,
            events.InstanceJoined: self._membership.add_instance,
            events.VersionOffered: self._offer_version,
            events.VersionRecalled: self._membership.recall_version,
            events.InstanceFaulted: self._membership.record_fault,
            events.InstanceHeartbeat: self._membership.record_heartbeat,
            events.InstanceNotice: self._membership.handle_notice,
            events.DrainRequested: self._membership.drain,
            events.InstanceLost: self._membership.lose_instance,
            events.BudgetChanged: self._membership.change_budget,
            TimerFired: self._timer,
            events.StepBegan: self._seeding.begin_step,
            events.TrainerWanted: self._seeding.claim_for_trainer,
            events.TrainerWaits: self._seeding.consider_resuming,
            events.StepEnded: self._seeding.end_step,
            events.StepDropped: self._seeding.drop_job,
            events.OwnersNamed: self._add_owners,
            events.JobGated: self._set_gate,
        }

    def handle(self, event: events.RolloutEvent) -> Sequence[RolloutCommand]:
        """Take one event; return what the runtime must do, in order."""
        state = self.state
        state.now_s, state.out = event.now_s, []
        self._handlers[type(event)](event)
        if self._seeding.steps:
            self._seeding.end_finished()
        if state.instances.recalling:
            self._membership.report_freed_versions()
        if not self._watching and (state.turns or len(state.instances)):
            self._watching = True
            state.out.append(SetTimer(WATCH, event.now_s + state.settings.watch_every_s))
        return state.out

    def _submit(self, event: events.TurnSubmitted) -> None:
        spec, state = event.spec, self.state
        if spec.turn in state.turns:
            return  # submitted twice: it is being generated
        limit_s = event.now_s + state.settings.turn_timeout_s
        deadline_s = limit_s if spec.deadline_s is None else min(spec.deadline_s, limit_s)
        turn = LiveTurn(spec, deadline_s, state.counters.submitted)
        if event.tokens:
            turn.take_over(event.tokens, event.logprobs)
        self.dispatcher.open(turn)
        longest = state.instances.longest_for(spec.job, spec.base_model)
        if longest is not None and longest <= turn.context_tokens:
            error = f"prompt: {turn.context_tokens} tokens leave no room in a context of {longest}"
            self.dispatcher.fail(turn, error)
            return
        self.dispatcher.place(turn)

    def _add_owners(self, event: events.OwnersNamed) -> None:
        self.dispatcher.owners |= set(event.owners)

    def _set_gate(self, event: events.JobGated) -> None:
        """Stop turns where the job may no longer run, and dispatch waiting ones where it may."""
        state, dispatcher = self.state, self.dispatcher
        gates = state.instances.gates
        gates.set(event.job, event.gate)
        state.instances.invalidate()
        turns = [turn for turn in state.turns.values() if turn.spec.job == event.job]
        for turn in turns:
            if turn.instance is None:
                dispatcher.queue.remove(turn)
                turn.earlier_queued_s, turn.waiting_since_s = turn.total_queued_s(event.now_s), None
                dispatcher.place(turn)
            elif not gates.admits(event.job, state.instances.records[turn.instance].spec):
                dispatcher.recall(turn)
                dispatcher.resume(turn)
        for record in list(state.instances):
            dispatcher.fill(record)

    def _offer_version(self, event: events.VersionOffered) -> None:
        self._membership.add_version(event)
        self._seeding.reconsider()

    def _cancel(self, event: events.TurnCancelled) -> None:
        turn = self.state.turns.get(event.turn)
        if turn is not None:
            self.state.counters.cancelled += 1
            self.dispatcher.stop(turn)
            self.dispatcher.close(turn)

    def _timer(self, event: TimerFired) -> None:
        if event.name == WATCH:
            self._watching = False
            self._expire()
            self.dispatcher.order_starts()
            for record in self.dispatcher.homes.expire(event.now_s):
                self.dispatcher.fill(record)
            self._membership.watch()
            self._seeding.watch()
            self._rebalancer.watch()
            self._long_tail.watch()
        elif event.name.startswith(SEEDING):
            self._seeding.consider(JobId(event.name.removeprefix(SEEDING)))

    def _expire(self) -> None:
        """Fail the turns whose deadline has passed."""
        deadlines, state = self.state.deadlines, self.state
        while deadlines and deadlines[0][0] <= state.now_s:
            _, sequence, name = heapq.heappop(deadlines)
            turn = state.turns.get(name)
            if turn is None or turn.sequence != sequence:
                continue
            where = f"on {turn.instance}" if turn.instance else "waiting for an instance"
            progress = f"{len(turn.tokens)} of {turn.limit} tokens generated, {where}"
            self.dispatcher.stop(turn)
            self.dispatcher.fail(turn, f"deadline passed: {progress}")

    def turns_of(self, job: JobId) -> list[LiveTurn]:
        """The live turns of a job; the caller must not change them."""
        return [turn for turn in self.state.turns.values() if turn.spec.job == job]

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        check_state(self.state, self.dispatcher)
        assert self._watching or not (self.state.turns or len(self.state.instances))

    def tokens_by_source(self) -> dict[str, dict[str, int]]:
        """Tokens of completed turns since the start, by base model and kind of instance."""
        found: dict[str, dict[str, int]] = {}
        for (model, kind), tokens in self.state.counters.tokens.items():
            found.setdefault(model, {})[kind.value] = tokens
        return found

    def gauges(self) -> dict[str, float]:
        """Current values and totals, for metrics."""
        counters = self.state.counters
        return {
            "live_turns": len(self.state.turns),
            "waiting_turns": len(self.dispatcher.queue),
            "instances": len(self.state.instances),
            "submitted_turns": counters.submitted,
            "completed_turns": counters.completed,
            "failed_turns": counters.failed,
            "cancelled_turns": counters.cancelled,
            "moved_turns": counters.moved,
            "accepted_tokens": counters.accepted_tokens,
            "late_tokens": counters.late_tokens,
            "faults": counters.faults,
        }


class Ownership:
    """Checks instances' replies about turns before they count (RLBoost 4.2).

    A reply of an attempt that is no longer current is discarded. An impossible reply (an attempt
    never sent there, tokens beyond the budget, another version, a gap) is a fault of the instance:
    the attempt is undone, the turn continues elsewhere, and an instance with too many faults is
    released.
    """

    def __init__(self, state: ManagerState, dispatcher: Dispatcher, membership: Membership) -> None:
        self._state = state
        self._dispatcher = dispatcher
        self._membership = membership

    def tokens_arrived(self, event: events.TokensArrived) -> None:
        record = self._state.instances.records.get(event.instance)
        if record is None:
            self._state.counters.late_tokens += len(event.tokens)
            return
        record.heard_s = record.progress_s = event.now_s
        plain = not event.counts and not event.topk
        if plain:  # the common frame: one token per turn, mostly of the same turns as before
            streamed = record.frames.take(event.attempts, event.tokens, event.logprobs)
            if streamed is not None:
                self._state.counters.accepted_tokens += len(event.tokens)
                self._state.out.extend(streamed)
                return
        if not self._is_well_formed(event):
            self._membership.fault(record, "a malformed token frame")
            return
        self._append_rows(event)
        if plain:
            record.frames.follow(event.attempts)

    def _append_rows(self, event: events.TokensArrived) -> None:
        attempts, instance, start, accepted = self._dispatcher.attempts, event.instance, 0, 0
        tokens, logprobs = event.tokens, event.logprobs
        streamed = list[TurnId](), array("I"), array("f"), list[int]()
        for attempt, count in zip(event.attempts, event.counts or repeat(1), strict=False):
            end = start + count
            turn = attempts.get(attempt)
            if (
                turn is None
                or turn.instance != instance
                or turn.topk is not None
                or len(held := turn.tokens) + count > turn.limit
                or ((is_streamed := turn.spec.stream) and not turn.is_stream_current)
            ):
                self._append_row(event, attempt, start, end)
            else:
                more, scores = tokens[start:end], logprobs[start:end]
                if is_streamed:
                    turn.streamed_tokens += count
                    streamed[0].append(turn.spec.turn)
                    streamed[1].extend(more)
                    streamed[2].extend(scores)
                    streamed[3].append(count)
                held.extend(more)
                turn.logprobs.extend(scores)
                turn.losses_without_progress = 0
                accepted += count
            start = end
        self._state.counters.accepted_tokens += accepted
        if streamed[0]:
            self._state.out.append(StreamTokens(*streamed))

    def _append_row(self, event: events.TokensArrived, attempt: int, start: int, end: int) -> None:
        """Append one row of a frame, unless it is late or beyond the turn's budget."""
        turn, count = self._current(event.instance, attempt), end - start
        if turn is None:
            self._state.counters.late_tokens += count
            return
        if len(turn.tokens) + count > turn.limit:
            self._undo(turn, f"more than the {turn.limit} tokens that {turn.spec.turn} may have")
            return
        turn.tokens.extend(event.tokens[start:end])
        turn.logprobs.extend(event.logprobs[start:end])
        if turn.topk is not None:
            turn.topk.extend(event.topk[start:end] if event.topk else [()] * count)
        turn.losses_without_progress = 0
        self._state.counters.accepted_tokens += count
        if turn.spec.stream:
            self._stream(turn)

    @staticmethod
    def _is_well_formed(event: events.TokensArrived) -> bool:
        tokens = len(event.tokens)
        counted = sum(event.counts) if event.counts else len(event.attempts)
        return (
            counted == tokens == len(event.logprobs)
            and (not event.counts or len(event.counts) == len(event.attempts))
            and (not event.topk or len(event.topk) == tokens)
            and min(event.counts, default=1) > 0
            and _are_token_ids(event.tokens)
        )

    def _stream(self, turn: LiveTurn) -> None:
        """Stream tokens that the client has not seen: after a rollback positions repeat."""
        whole, seen = turn.tokens, turn.streamed_tokens
        if len(whole) > seen:
            tokens, logprobs = whole[seen:].tolist(), turn.logprobs[seen:].tolist()
            topk = () if turn.topk is None else turn.topk[seen:]
            scores, others = (None, ()) if seen else (turn.prompt_logprobs, turn.prompt_topk)
            self._state.out.append(
                AppendTokens(turn.spec.turn, tokens, logprobs, topk, scores, others)
            )
            turn.streamed_tokens = len(whole)

    def prompt_scored(self, event: events.PromptScored) -> None:
        """Keep the prompt's log-probs, so that a later attempt need not compute them again."""
        turn = self._current(event.instance, event.attempt)
        if turn is None:
            return
        if len(event.logprobs) != len(turn.spec.prompt):
            what = f"{len(event.logprobs)} log-probs for a prompt of {len(turn.spec.prompt)} tokens"
            self._undo(turn, what)
            return
        sampling, later = turn.spec.sampling, len(turn.spec.prompt) - 1
        asked = (
            later * bool(sampling.target_prompt_tokens),
            later * bool(sampling.prompt_alternatives),
        )
        if (len(event.targets), len(event.alternatives)) != asked:
            what = (
                f"{len(event.targets)} rows of targets, {len(event.alternatives)} of draws, not "
                f"{asked}"
            )
            self._undo(turn, what)
            return
        turn.prompt_logprobs = event.logprobs
        turn.prompt_topk = event.topk
        turn.prompt_targets = event.targets
        turn.prompt_alternatives = event.alternatives

    def turn_ended(self, event: events.TurnEnded) -> None:
        """Complete the turn if its end agrees with what was received."""
        turn = self._current(event.instance, event.attempt)
        if turn is None:
            return
        record = self._state.instances.records[event.instance]
        record.heard_s = record.progress_s = event.now_s
        turn.leave_buffer()  # to flush all turns beside it would double the time of this decision
        what = self._contradiction(turn, event, record.spec.max_context_tokens)
        if what is not None:
            self._undo(turn, what)
            return
        self._dispatcher.complete(turn, event.reason)

    @staticmethod
    def _contradiction(
        turn: LiveTurn, event: events.TurnEnded, max_context_tokens: int
    ) -> str | None:
        made = len(turn.tokens)
        if event.version != turn.version:
            return f"{turn.spec.turn} generated with {event.version}, not {turn.version}"
        if event.total_tokens != made:
            return f"{event.total_tokens} tokens of {turn.spec.turn}, received {made}"
        if turn.wants_prompt_scores:
            return f"no prompt log-probs of {turn.spec.turn}"
        cut_short = made < turn.limit and event.reason is FinishReason.LENGTH
        if cut_short and turn.context_tokens + 1 < max_context_tokens:
            return f"{turn.spec.turn} cut at {made} of {turn.limit} tokens"
        return None

    def turn_refused(self, event: events.TurnRefused) -> None:
        """Fail the turn if it is at fault, else run it elsewhere."""
        turn = self._current(event.instance, event.attempt)
        if turn is None:
            return
        if event.turn_at_fault:
            self._dispatcher.fail(turn, event.error)
            return
        if len(turn.tokens) > turn.base_tokens:
            turn.losses_without_progress = 0
        self._dispatcher.detach(turn)
        turn.moves += 1
        turn.avoided_instance = event.instance
        self._count_loss(turn, event.error)

    def _count_loss(self, turn: LiveTurn, error: str) -> None:
        turn.losses_without_progress += 1
        if turn.losses_without_progress > self._state.settings.max_losses_without_progress:
            self._dispatcher.fail(turn, f"refused {turn.losses_without_progress} times: {error}")
        else:
            self._dispatcher.resume(turn)

    def _current(self, instance: InstanceId, attempt: int) -> LiveTurn | None:
        turn = self._dispatcher.attempts.get(attempt)
        if turn is not None and turn.instance == instance:
            return turn
        record = self._state.instances.records.get(instance)
        foreign = turn is not None or not 0 < attempt < self._dispatcher.next_attempt
        if foreign and record is not None:
            what = f"attempt {attempt}, which was never dispatched there"
            self._membership.fault(record, what)
        return None

    def _undo(self, turn: LiveTurn, what: str) -> None:
        """Discard the tokens of a false attempt, and continue the turn elsewhere."""
        assert turn.instance is not None
        record = self._state.instances.records[turn.instance]
        turn.roll_back()
        turn.avoided_instance = turn.instance
        self._dispatcher.recall(turn)
        self._membership.fault(record, what)
        self._count_loss(turn, what)
        if record.spec.instance in self._state.instances.records:
            self._dispatcher.fill(record)


def _are_token_ids(tokens: Sequence[int]) -> bool:
    if isinstance(tokens, array) and tokens.typecode == "I":
        return True  # its type bounds them
    return min(tokens, default=0) >= 0 and max(tokens, default=0) < _TOKEN_IDS
