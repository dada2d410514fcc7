"""The state that the parts of the rollout manager share, and how a turn ends."""

import heapq
from collections import Counter
from dataclasses import dataclass, field

from slackwater.control.rollout.commands import (
    AbortTurn,
    CompleteTurn,
    FailTurn,
    ReportFault,
    RolloutCommand,
)
from slackwater.control.rollout.demand import Demand
from slackwater.control.rollout.dispatcher import Dispatcher
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.control.rollout.instances import InstanceRecord, Instances
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.ids import InstanceId, JobId, TurnId
from slackwater.model.instance import InstanceKind
from slackwater.model.turn import FinishReason
from slackwater.policy.rollout.plateau import ThroughputProfile
from slackwater.policy.rollout.response_lengths import ResponseLengths
from slackwater.policy.rollout.step_time import StepTimeFit

Out = list[RolloutCommand]


@dataclass(slots=True)
class RolloutCounters:
    """Totals since the manager started."""

    submitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    moved: int = 0
    late_tokens: int = 0
    accepted_tokens: int = 0
    faults: int = 0
    # of completed turns, by base model and kind of the last instance
    tokens: Counter[tuple[str, InstanceKind]] = field(default_factory=Counter)


@dataclass(slots=True)
class JobWork:
    """A job's live and ended turns, when the last ended, and the base models of all of them.

    Kept while a turn lives, and from the job's first step on.
    """

    live_turns: int = 0
    base_models: set[str] = field(default_factory=set)
    steps: bool = False
    closed_turns: int = 0
    done_tokens: int = 0
    closed_s: float = 0.0


@dataclass(slots=True)
class ManagerState:
    """The state of the rollout manager."""

    settings: RolloutSettings
    instances: Instances = field(default_factory=Instances)
    turns: dict[TurnId, LiveTurn] = field(default_factory=dict)
    deadlines: list[tuple[float, int, TurnId]] = field(default_factory=list)
    counters: RolloutCounters = field(default_factory=RolloutCounters)
    profile: ThroughputProfile = field(default_factory=ThroughputProfile)
    step_time: StepTimeFit = field(default_factory=StepTimeFit)
    lengths: ResponseLengths = field(default_factory=ResponseLengths)
    work: dict[JobId, JobWork] = field(default_factory=dict)
    demand: Demand = field(default_factory=Demand)
    dispatcher: Dispatcher = field(init=False)

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.settings, self.instances)

    def work_of(self, job: JobId) -> JobWork:
        work = self.work.get(job)
        if work is None:
            work = self.work[job] = JobWork()
        return work

    def forget_work(self, job: JobId) -> None:
        """Drop a job's work unless it has live turns or steps."""
        work = self.work.get(job)
        if work is not None and not (work.live_turns or work.steps):
            del self.work[job]

    def open(self, turn: LiveTurn, out: Out) -> None:
        now_s = self.dispatcher.now_s
        out.append(TurnOpened(now_s, turn.spec.job, turn.spec.base_model, turn.sequence))
        work = self.work_of(turn.spec.job)
        work.live_turns += 1
        work.base_models.add(turn.spec.base_model)
        self.demand.record_open(turn, now_s, out)
        self.dispatcher.homes.record_open(turn, now_s)
        self.turns[turn.spec.turn] = turn
        self.counters.submitted += 1
        heapq.heappush(self.deadlines, (turn.deadline_s, turn.sequence, turn.spec.turn))

    def complete(self, turn: LiveTurn, reason: FinishReason, now_s: float, out: Out) -> None:
        """End a complete turn, and fill the room that it leaves."""
        spec, tokens = turn.spec, turn.tokens
        self.counters.completed += 1
        self.lengths.observe(len(tokens))
        self.work_of(spec.job).done_tokens += len(tokens)
        if turn.instance in self.instances.records:
            source = spec.base_model, self.instances.records[turn.instance].spec.kind
            self.counters.tokens[source] += len(tokens)
        out.append(
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
        self.close(turn, now_s, out, completed=True)

    def fail(self, turn: LiveTurn, error: str, now_s: float, out: Out) -> None:
        """Fail one turn."""
        self.counters.failed += 1
        out.append(FailTurn(turn.spec.turn, error))
        self.close(turn, now_s, out)

    def stop(self, turn: LiveTurn, out: Out) -> None:
        """Abort the turn on its instance, if it runs; `close` follows."""
        if turn.attempt is not None and turn.instance is not None:
            out.append(AbortTurn(turn.instance, turn.attempt))

    def close(self, turn: LiveTurn, now_s: float, out: Out, *, completed: bool = False) -> None:
        """Remove the turn from all state, and fill the room that it leaves."""
        spec = turn.spec
        del self.turns[spec.turn]
        if len(self.deadlines) > 2 * len(self.turns) + 64:  # most belong to ended turns
            self.deadlines[:] = [row for row in self.deadlines if row[2] in self.turns]
            heapq.heapify(self.deadlines)
        work = self.work_of(spec.job)
        work.live_turns -= 1
        work.closed_turns += 1
        work.closed_s = now_s
        self.forget_work(spec.job)
        self.dispatcher.queue.remove(turn)
        self.dispatcher.homes.record_close(turn, now_s)
        record = self.dispatcher.detach(turn)
        out.append(
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
        self.demand.record_close(turn, now_s, out)
        if record is not None:
            self.dispatcher.fill(record, now_s, out)

    def resume(self, turn: LiveTurn, now_s: float, out: Out) -> None:
        """Dispatch again a turn that lost its instance, unless its tokens complete it."""
        reason = turn.end_reason()
        if reason is not None:
            self.complete(turn, reason, now_s, out)
            return
        self.counters.moved += 1
        self.dispatcher.place(turn, now_s, out, first=True)

    def report(self, instance: InstanceId, what: str, out: Out) -> None:
        """Report a fault to the operator."""
        self.counters.faults += 1
        out.append(ReportFault(instance, what))

    def room_changed(self, record: InstanceRecord, now_s: float, out: Out) -> None:
        """Fill an instance that may accept more turns than before."""
        record.refresh()
        self.instances.invalidate()
        self.dispatcher.fill(record, now_s, out)
