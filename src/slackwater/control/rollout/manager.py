"""The rollout manager: one controller for every kind of instance.

    events -> manager.handle(event) -> commands

It owns every turn's tokens; instances only lend a hand. Parts: `dispatcher` (where a turn goes),
`ownership` (what instances say about turns), `membership` (instances that come and go),
`rebalancer` (moves), `seeding` (how long training nodes roll out themselves).
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from slackwater.control.rollout import events
from slackwater.control.rollout.commands import RolloutCommand
from slackwater.control.rollout.integrity import check_books
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.manager_state import ManagerState, Out
from slackwater.control.rollout.membership import Membership
from slackwater.control.rollout.ownership import Ownership
from slackwater.control.rollout.rebalancer import Rebalancer
from slackwater.control.rollout.seeding import SEEDING, Seeding
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId

WATCH = "rollout-watch"


class RolloutManager:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self, settings: RolloutSettings | None = None) -> None:
        self.books = ManagerState(settings or RolloutSettings())
        self._membership = Membership(self.books)
        self._ownership = Ownership(self.books, self._membership)
        self._rebalancer = Rebalancer(self.books)
        self._seeding = Seeding(self.books, self._membership)
        self._watching = False
        self._handlers: dict[type, Callable[[Any, Out], None]] = {
            events.TurnSubmitted: self._submitted,
            events.TurnCancelled: self._cancelled,
            events.TokensArrived: self._ownership.tokens_arrived,
            events.PromptScored: self._ownership.prompt_scored,
            events.TurnEnded: self._ownership.turn_ended,
            events.TurnRefused: self._ownership.turn_refused,
            events.InstanceJoined: self._membership.joined,
            events.VersionOffered: self._offered,
            events.VersionRecalled: self._membership.recalled,
            events.InstanceFaulted: self._membership.blamed,
            events.InstanceHeartbeat: self._membership.heartbeat,
            events.InstanceNotice: self._membership.notice,
            events.DrainAsked: self._membership.drain_asked,
            events.InstanceLost: self._membership.lost,
            events.BudgetChanged: self._membership.budget_changed,
            TimerFired: self._timer,
            events.StepBegan: self._seeding.began,
            events.TrainerWanted: self._seeding.trainer_wanted,
            events.TrainerWaits: self._seeding.trainer_waits,
            events.StepEnded: self._seeding.ended,
            events.StepDropped: self._seeding.dropped,
            events.OwnersNamed: self._named,
            events.JobGated: self._gated,
        }

    def handle(self, event: events.RolloutEvent) -> Sequence[RolloutCommand]:
        """Take one event; return what the body must do, in order."""
        out: Out = []
        self.books.dispatcher.now_s = event.now_s
        self._handlers[type(event)](event, out)
        self._seeding.settle(event.now_s, out)
        if self.books.instances.recalling:
            self._membership.settle(event.now_s, out)
        if not self._watching and (self.books.turns or len(self.books.instances)):
            self._watching = True
            out.append(SetTimer(WATCH, event.now_s + self.books.settings.watch_every_s))
        return out

    def _submitted(self, event: events.TurnSubmitted, out: Out) -> None:
        spec, books = event.spec, self.books
        if spec.turn in books.turns:
            return  # submitted twice: it is being generated already
        limit_s = event.now_s + books.settings.turn_timeout_s
        deadline_s = limit_s if spec.deadline_s is None else min(spec.deadline_s, limit_s)
        turn = LiveTurn(spec, deadline_s, books.counters.submitted)
        turn.take_over(event.tokens, event.logprobs)
        books.open(turn, out)
        longest = books.instances.longest_for(spec.job, spec.base_model)
        if longest is not None and turn.context_tokens >= longest:
            error = f"prompt: {turn.context_tokens} tokens leave no room in a context of {longest}"
            books.fail(turn, error, event.now_s, out)
            return
        books.dispatcher.place(turn, event.now_s, out)

    def _named(self, event: events.OwnersNamed, out: Out) -> None:
        del out
        self.books.dispatcher.owners |= set(event.owners)

    def _gated(self, event: events.JobGated, out: Out) -> None:
        """Turns where the job may no longer run stop and wait; waiting ones run where they may."""
        books, dispatcher = self.books, self.books.dispatcher
        gates = books.instances.gates
        gates.set(event.job, event.gate)
        books.instances.changed()
        mine = [turn for turn in books.turns.values() if turn.spec.job == event.job]
        for turn in mine:
            if turn.instance is None:
                dispatcher.line.remove(turn)
                turn.waits_s, turn.waiting_since_s = turn.waited_s(event.now_s), None
                dispatcher.place(turn, event.now_s, out)
            elif not gates.admits(event.job, books.instances.records[turn.instance].spec):
                dispatcher.recall(turn, out)
                books.resume(turn, event.now_s, out)
        for record in list(books.instances):
            dispatcher.fill(record, event.now_s, out)

    def _offered(self, event: events.VersionOffered, out: Out) -> None:
        self._membership.offered(event, out)
        self._seeding.reconsider(event.now_s, out)

    def _cancelled(self, event: events.TurnCancelled, out: Out) -> None:
        turn = self.books.turns.get(event.turn)
        if turn is not None:
            self.books.counters.cancelled += 1
            self.books.stop(turn, out)
            self.books.close(turn, event.now_s, out)

    def _timer(self, event: TimerFired, out: Out) -> None:
        if event.name == WATCH:
            self._watching = False
            self._expire(event.now_s, out)
            for record in self.books.dispatcher.homes.expire(event.now_s):
                self.books.dispatcher.fill(record, event.now_s, out)
            self._membership.watch(event.now_s, out)
            self._seeding.watch(event.now_s, out)
            self._rebalancer.watch(event.now_s, out)
        elif event.name.startswith(SEEDING):
            self._seeding.timer(event.name, event.now_s, out)

    def _expire(self, now_s: float, out: Out) -> None:
        """Fail the turns whose deadline has come."""
        deadlines, books = self.books.deadlines, self.books
        while deadlines and deadlines[0][0] <= now_s:
            _, sequence, name = heapq.heappop(deadlines)
            turn = books.turns.get(name)
            if turn is None or turn.sequence != sequence:
                continue
            where = f"on {turn.instance}" if turn.instance else "waiting for an instance"
            made = f"{len(turn.tokens)} of {turn.limit} tokens made, {where}"
            books.stop(turn, out)
            books.fail(turn, f"deadline passed: {made}", now_s, out)

    def turns_of(self, job: JobId) -> list[LiveTurn]:
        """The live turns of a job; the caller must not change them."""
        return [turn for turn in self.books.turns.values() if turn.spec.job == job]

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        check_books(self.books)
        assert self._watching or not (self.books.turns or len(self.books.instances))

    def tokens_by_source(self) -> dict[str, dict[str, int]]:
        """Of completed turns since the manager started: by base model and kind of instance."""
        found: dict[str, dict[str, int]] = {}
        for (model, kind), tokens in self.books.counters.tokens.items():
            found.setdefault(model, {})[kind.value] = tokens
        return found

    def gauges(self) -> dict[str, float]:
        """For metrics: the present and the totals."""
        counters = self.books.counters
        return {
            "live_turns": len(self.books.turns),
            "waiting_turns": len(self.books.dispatcher.line),
            "instances": len(self.books.instances),
            "submitted_turns": counters.submitted,
            "completed_turns": counters.completed,
            "failed_turns": counters.failed,
            "cancelled_turns": counters.cancelled,
            "moved_turns": counters.moved,
            "accepted_tokens": counters.accepted_tokens,
            "late_tokens": counters.late_tokens,
            "faults": counters.faults,
        }
