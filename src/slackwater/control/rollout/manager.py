"""The rollout manager: one controller for every kind of instance.

    events -> manager.handle(event) -> commands

It owns every turn's tokens. Parts: `dispatcher` (which instance runs a turn), `ownership` (checks
instances' reports about turns), `membership` (instances that join and leave), `rebalancer` (moves),
`seeding` (how long training nodes roll out themselves).
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from slackwater.control.rollout import events
from slackwater.control.rollout.commands import RolloutCommand
from slackwater.control.rollout.integrity import check_state
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
        self.state = ManagerState(settings or RolloutSettings())
        self._membership = Membership(self.state)
        self._ownership = Ownership(self.state, self._membership)
        self._rebalancer = Rebalancer(self.state)
        self._seeding = Seeding(self.state, self._membership)
        self._watching = False
        self._handlers: dict[type, Callable[[Any, Out], None]] = {
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
        out: Out = []
        self.state.dispatcher.now_s = event.now_s
        self._handlers[type(event)](event, out)
        self._seeding.end_finished(event.now_s, out)
        if self.state.instances.recalling:
            self._membership.report_freed_versions(event.now_s, out)
        if not self._watching and (self.state.turns or len(self.state.instances)):
            self._watching = True
            out.append(SetTimer(WATCH, event.now_s + self.state.settings.watch_every_s))
        return out

    def _submit(self, event: events.TurnSubmitted, out: Out) -> None:
        spec, state = event.spec, self.state
        if spec.turn in state.turns:
            return  # submitted twice: it is being generated
        limit_s = event.now_s + state.settings.turn_timeout_s
        deadline_s = limit_s if spec.deadline_s is None else min(spec.deadline_s, limit_s)
        turn = LiveTurn(spec, deadline_s, state.counters.submitted)
        turn.take_over(event.tokens, event.logprobs)
        state.open(turn, out)
        longest = state.instances.longest_for(spec.job, spec.base_model)
        if longest is not None and turn.context_tokens >= longest:
            error = f"prompt: {turn.context_tokens} tokens leave no room in a context of {longest}"
            state.fail(turn, error, event.now_s, out)
            return
        state.dispatcher.place(turn, event.now_s, out)

    def _add_owners(self, event: events.OwnersNamed, out: Out) -> None:
        del out
        self.state.dispatcher.owners |= set(event.owners)

    def _set_gate(self, event: events.JobGated, out: Out) -> None:
        """Stop turns where the job may no longer run, and dispatch waiting ones where it may."""
        state, dispatcher = self.state, self.state.dispatcher
        gates = state.instances.gates
        gates.set(event.job, event.gate)
        state.instances.invalidate()
        turns = [turn for turn in state.turns.values() if turn.spec.job == event.job]
        for turn in turns:
            if turn.instance is None:
                dispatcher.queue.remove(turn)
                turn.earlier_queued_s, turn.waiting_since_s = turn.total_queued_s(event.now_s), None
                dispatcher.place(turn, event.now_s, out)
            elif not gates.admits(event.job, state.instances.records[turn.instance].spec):
                dispatcher.recall(turn, out)
                state.resume(turn, event.now_s, out)
        for record in list(state.instances):
            dispatcher.fill(record, event.now_s, out)

    def _offer_version(self, event: events.VersionOffered, out: Out) -> None:
        self._membership.add_version(event, out)
        self._seeding.reconsider(event.now_s, out)

    def _cancel(self, event: events.TurnCancelled, out: Out) -> None:
        turn = self.state.turns.get(event.turn)
        if turn is not None:
            self.state.counters.cancelled += 1
            self.state.stop(turn, out)
            self.state.close(turn, event.now_s, out)

    def _timer(self, event: TimerFired, out: Out) -> None:
        if event.name == WATCH:
            self._watching = False
            self._expire(event.now_s, out)
            self.state.dispatcher.order_starts()
            for record in self.state.dispatcher.homes.expire(event.now_s):
                self.state.dispatcher.fill(record, event.now_s, out)
            self._membership.watch(event.now_s, out)
            self._seeding.watch(event.now_s, out)
            self._rebalancer.watch(event.now_s, out)
        elif event.name.startswith(SEEDING):
            self._seeding.timer(event.name, event.now_s, out)

    def _expire(self, now_s: float, out: Out) -> None:
        """Fail the turns whose deadline has passed."""
        deadlines, state = self.state.deadlines, self.state
        while deadlines and deadlines[0][0] <= now_s:
            _, sequence, name = heapq.heappop(deadlines)
            turn = state.turns.get(name)
            if turn is None or turn.sequence != sequence:
                continue
            where = f"on {turn.instance}" if turn.instance else "waiting for an instance"
            progress = f"{len(turn.tokens)} of {turn.limit} tokens generated, {where}"
            state.stop(turn, out)
            state.fail(turn, f"deadline passed: {progress}", now_s, out)

    def turns_of(self, job: JobId) -> list[LiveTurn]:
        """The live turns of a job; the caller must not change them."""
        return [turn for turn in self.state.turns.values() if turn.spec.job == job]

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        check_state(self.state)
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
            "waiting_turns": len(self.state.dispatcher.queue),
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
