"""Token-level ownership (RLBoost 4.2): instances' replies are checked before they count.

A reply of an attempt that is no longer current is discarded. An impossible reply (an attempt never
sent there, tokens beyond the budget, another version, a gap) is a fault of the instance: the
attempt is undone, the turn continues elsewhere, and an instance with too many faults is released.
"""

from array import array
from collections.abc import Sequence
from itertools import repeat

from slackwater.control.rollout.commands import AppendTokens, StreamTokens
from slackwater.control.rollout.events import PromptScored, TokensArrived, TurnEnded, TurnRefused
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.manager_state import ManagerState, Out
from slackwater.control.rollout.membership import Membership
from slackwater.control.rollout.steady_frame import SteadyFrame
from slackwater.model.ids import InstanceId, TurnId
from slackwater.model.turn import AttemptId, FinishReason

_TOKEN_IDS = 2**32


def _are_token_ids(tokens: Sequence[int]) -> bool:
    if isinstance(tokens, array) and tokens.typecode == "I":
        return True  # its type bounds them
    return min(tokens, default=0) >= 0 and max(tokens, default=0) < _TOKEN_IDS


class Ownership:
    """Handles instances' replies about turns."""

    def __init__(self, state: ManagerState, membership: Membership) -> None:
        self._state = state
        self._membership = membership

    def tokens_arrived(self, event: TokensArrived, out: Out) -> None:
        record = self._state.instances.records.get(event.instance)
        if record is None:
            self._state.counters.late_tokens += len(event.tokens)
            return
        record.heard_s = record.progress_s = event.now_s
        if not self._is_well_formed(event):
            self._membership.fault(record, "a malformed token frame", event.now_s, out)
            return
        if event.counts or event.topk:
            self._append_rows(event, out)
        else:
            self._append_singles(record, event, out)

    def _append_singles(self, record: InstanceRecord, event: TokensArrived, out: Out) -> None:
        """The common frame: one token per turn, mostly of the same turns as the frame before."""
        columns = event.attempts, event.tokens, event.logprobs
        taken = None if record.steady_frame is None else record.steady_frame.take(*columns)
        if taken is None:
            turns = [record.attempts.get(AttemptId(attempt)) for attempt in event.attempts]
            # Streams pass their tokens on at once, so buffering the first frame gains nothing.
            if not any(turn is None or turn.spec.stream for turn in turns):
                record.steady_frame = SteadyFrame.build(event.attempts, turns)
                taken = None if record.steady_frame is None else record.steady_frame.take(*columns)
        if taken is None:
            self._append_rows(event, out)
            turns = [record.attempts.get(AttemptId(attempt)) for attempt in event.attempts]
            record.steady_frame = SteadyFrame.build(event.attempts, turns)
            return
        self._state.counters.accepted_tokens += len(event.tokens)
        out.extend(taken)

    def _append_rows(self, event: TokensArrived, out: Out) -> None:
        attempts, instance, start, accepted = self._state.dispatcher.attempts, event.instance, 0, 0
        tokens, logprobs = event.tokens, event.logprobs
        streamed = list[TurnId](), array("I"), array("f"), list[int]()
        for attempt, count in zip(event.attempts, event.counts or repeat(1), strict=False):
            end = start + count
            turn = attempts.get(attempt)
            if (
                turn is None
                or turn.instance != instance
                or turn.topk is not None
                or len(turn.tokens) + count > turn.limit
                or (turn.spec.stream and not turn.is_stream_current)
            ):
                self._append_row(event, attempt, start, end, out)
            else:
                if turn.spec.stream:
                    turn.streamed_tokens += count
                    streamed[0].append(turn.spec.turn)
                    streamed[1].extend(tokens[start:end])
                    streamed[2].extend(logprobs[start:end])
                    streamed[3].append(count)
                turn.tokens.extend(tokens[start:end])
                turn.logprobs.extend(logprobs[start:end])
                turn.losses_without_progress = 0
                accepted += count
            start = end
        self._state.counters.accepted_tokens += accepted
        if streamed[0]:
            out.append(StreamTokens(*streamed))

    def _append_row(
        self, event: TokensArrived, attempt: int, start: int, end: int, out: Out
    ) -> None:
        turn = self._current(event.instance, attempt, event.now_s, out)
        if turn is None:
            self._state.counters.late_tokens += end - start
        else:
            self._append(turn, event, start, end, out)

    @staticmethod
    def _is_well_formed(event: TokensArrived) -> bool:
        tokens = len(event.tokens)
        counted = sum(event.counts) if event.counts else len(event.attempts)
        return (
            counted == tokens == len(event.logprobs)
            and (not event.counts or len(event.counts) == len(event.attempts))
            and (not event.topk or len(event.topk) == tokens)
            and min(event.counts, default=1) > 0
            and _are_token_ids(event.tokens)
        )

    def _append(self, turn: LiveTurn, event: TokensArrived, start: int, end: int, out: Out) -> None:
        room = turn.limit - len(turn.tokens)
        if end - start > room:
            what = f"more than the {turn.limit} tokens that {turn.spec.turn} may have"
            self._undo(turn, what, event.now_s, out)
            return
        tokens = event.tokens[start:end]
        logprobs = event.logprobs[start:end]
        turn.tokens.extend(tokens)
        turn.logprobs.extend(logprobs)
        if turn.topk is not None:
            turn.topk.extend(event.topk[start:end] if event.topk else [()] * (end - start))
        turn.losses_without_progress = 0
        self._state.counters.accepted_tokens += end - start
        if turn.spec.stream:
            self._stream(turn, out)

    @staticmethod
    def _stream(turn: LiveTurn, out: Out) -> None:
        """Stream tokens that the client has not seen: after a rollback positions repeat."""
        whole, seen = turn.tokens, turn.streamed_tokens
        if len(whole) > seen:
            tokens, logprobs = whole[seen:].tolist(), turn.logprobs[seen:].tolist()
            topk = () if turn.topk is None else turn.topk[seen:]
            scores, others = (None, ()) if seen else (turn.prompt_logprobs, turn.prompt_topk)
            out.append(AppendTokens(turn.spec.turn, tokens, logprobs, topk, scores, others))
            turn.streamed_tokens = len(whole)

    def prompt_scored(self, event: PromptScored, out: Out) -> None:
        """Keep the prompt's log-probs, so that a later attempt need not compute them again."""
        turn = self._current(event.instance, event.attempt, event.now_s, out)
        if turn is None:
            return
        if len(event.logprobs) != len(turn.spec.prompt):
            what = f"{len(event.logprobs)} log-probs for a prompt of {len(turn.spec.prompt)} tokens"
            self._undo(turn, what, event.now_s, out)
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
            self._undo(turn, what, event.now_s, out)
            return
        turn.prompt_logprobs = event.logprobs
        turn.prompt_topk = event.topk
        turn.prompt_targets = event.targets
        turn.prompt_alternatives = event.alternatives

    def turn_ended(self, event: TurnEnded, out: Out) -> None:
        """Complete the turn if its end agrees with what was received."""
        turn = self._current(event.instance, event.attempt, event.now_s, out)
        if turn is None:
            return
        record = self._state.instances.records[event.instance]
        record.heard_s = record.progress_s = event.now_s
        turn.collect()  # to flush all turns beside it would double the time of this decision
        what = self._contradiction(turn, event, record.spec.max_context_tokens)
        if what is not None:
            self._undo(turn, what, event.now_s, out)
            return
        self._state.complete(turn, event.reason, event.now_s, out)

    @staticmethod
    def _contradiction(turn: LiveTurn, event: TurnEnded, max_context_tokens: int) -> str | None:
        if event.version != turn.version:
            return f"{turn.spec.turn} generated with {event.version}, not {turn.version}"
        if event.total_tokens != len(turn.tokens):
            return f"{event.total_tokens} tokens of {turn.spec.turn}, received {len(turn.tokens)}"
        if turn.wants_prompt_scores:
            return f"no prompt log-probs of {turn.spec.turn}"
        cut_short = event.reason is FinishReason.LENGTH and len(turn.tokens) < turn.limit
        if cut_short and turn.context_tokens + 1 < max_context_tokens:
            return f"{turn.spec.turn} cut at {len(turn.tokens)} of {turn.limit} tokens"
        return None

    def turn_refused(self, event: TurnRefused, out: Out) -> None:
        """Fail the turn if it is at fault, else run it elsewhere."""
        turn = self._current(event.instance, event.attempt, event.now_s, out)
        if turn is None:
            return
        if event.turn_at_fault:
            self._state.fail(turn, event.error, event.now_s, out)
            return
        if len(turn.tokens) > turn.base_tokens:
            turn.losses_without_progress = 0
        self._state.dispatcher.detach(turn)
        turn.moves += 1
        turn.avoided_instance = event.instance
        self._count_loss(turn, event.error, event.now_s, out)

    def _count_loss(self, turn: LiveTurn, error: str, now_s: float, out: Out) -> None:
        turn.losses_without_progress += 1
        if turn.losses_without_progress > self._state.settings.max_losses_without_progress:
            self._state.fail(
                turn, f"refused {turn.losses_without_progress} times: {error}", now_s, out
            )
        else:
            self._state.resume(turn, now_s, out)

    def _current(
        self, instance: InstanceId, attempt: int, now_s: float, out: Out
    ) -> LiveTurn | None:
        turn = self._state.dispatcher.attempts.get(attempt)
        if turn is not None and turn.instance == instance:
            return turn
        record = self._state.instances.records.get(instance)
        foreign = turn is not None or not 0 < attempt < self._state.dispatcher.next_attempt
        if foreign and record is not None:
            what = f"attempt {attempt}, which was never dispatched there"
            self._membership.fault(record, what, now_s, out)
        return None

    def _undo(self, turn: LiveTurn, what: str, now_s: float, out: Out) -> None:
        """Discard the tokens of a false attempt, and continue the turn elsewhere."""
        assert turn.instance is not None
        record = self._state.instances.records[turn.instance]
        turn.roll_back()
        turn.avoided_instance = turn.instance
        self._state.dispatcher.recall(turn, out)
        self._membership.fault(record, what, now_s, out)
        self._count_loss(turn, what, now_s, out)
        if record.spec.instance in self._state.instances.records:
            self._state.dispatcher.fill(record, now_s, out)
