"""Where one job stands between its phases: what it holds, what it waits for, and what it would do
next.

Of a job whose own code asks for permits that is what was asked. Of any other it is inferred from
what its client does (fleet.md, Permits): turns are the rollout phase, passes and optimizer steps
the train phase. A rollout is over when an operation waits and the turns that came before it have
ended, or when weights are published again with no step between, since that begins the next
iteration. A train phase is over when no operation is left and either a turn waits or the step's
weights are published, or copied and on their way: what is left of that is the sync, which needs no
trainer. Of a client that goes on training, and does neither, each step is an iteration; it makes
several in one phase where nobody waits, and another job has the nodes of its rollout.
"""

from dataclasses import dataclass, field

from slackwater.control.coschedule.phase_events import PermitAsked
from slackwater.control.rollout.gates import TurnGate
from slackwater.model.ids import InstanceId, JobId, NodeId, RequestId
from slackwater.model.job import JobTerms
from slackwater.model.operation import OpKind
from slackwater.model.placement import Phase

TAIL_SHARE = 0.8
_LEAST_TURNS = 5  # fewer have no tail


@dataclass(slots=True)
class Hold:
    """A permit that the job has."""

    permit: int
    known_as: int
    phase: Phase
    nodes: tuple[NodeId, ...]
    since_s: float
    heard_s: float
    switch: bool = False
    kept: tuple[InstanceId, ...] | None = None  # of a tail
    tail_said: bool = False
    turns: int = 0
    done_turns: int = 0
    stepped_s: float | None = None  # when its last optimizer step ended
    longest_step_s: float = 0.0

    def step(self, now_s: float) -> None:
        """An optimizer step ended: the phase can be cut here."""
        began_s = self.since_s if self.stepped_s is None else self.stepped_s
        self.longest_step_s = max(self.longest_step_s, now_s - began_s)
        self.stepped_s = now_s


@dataclass(slots=True)
class JobPhases:
    """One job that takes part; `epoch` is the co-scheduler's, None while it has no place."""

    job: JobId
    terms: JobTerms
    epoch: int | None = None
    iteration: int = 0
    asks: bool = False  # its own code asks for permits
    ask: PermitAsked | None = None
    hold: Hold | None = None
    requested_s: float | None = None
    turns: set[int] = field(default_factory=set)
    before: int | None = None  # while a rollout drains: later turns wait
    ops: set[RequestId] = field(default_factory=set)
    stepped: bool = False
    published: bool = False
    trains_only: bool = False
    trains_on: bool = False  # nobody minds if its next step is of the same phase
    rest_due_s: float | None = None  # its timer
    away: bool = False  # another job has its place until it asks for something
    heard_s: float | None = None  # when its program last said that it lives, if it says so
    last_turns: int = 0
    trained_s: float | None = None  # when its last train phase ended
    idle_since_s: float = 0.0
    switches: int = 0
    strikes: int = 0
    seen: dict[Phase, list[float]] = field(default_factory=dict)
    cut_s: float = 0.0  # of a phase that was cut short, and goes on

    @property
    def is_idle(self) -> bool:
        """It neither runs nor waits."""
        return self.hold is None and self.requested_s is None

    @property
    def is_quiet(self) -> bool:
        """It has a permit, and its client does nothing with it."""
        return self.hold is not None and not self.asks and not self.turns and not self.ops

    def wanted(self, expected: Phase) -> Phase | None:
        """The phase that it would run next, if it has anything to do."""
        if self.asks:
            return None if self.ask is None else self.ask.phase
        if self.turns and (expected is Phase.ROLLOUT or not self.ops):
            return Phase.ROLLOUT
        return Phase.TRAIN if self.ops else None

    def is_over(self) -> bool:
        """Whether the phase that it holds is over, by what its client does."""
        if self.hold is None or self.asks:
            return False
        if self.hold.phase is Phase.ROLLOUT:
            return bool(self.ops) and not self._draining()
        if self.stepped and self.trains_only and not self.trains_on:
            return True
        return not self.ops and (bool(self.turns) or (self.stepped and self.published))

    def begins_anew(self, queued: OpKind) -> bool:
        """Whether weights are published in the middle of a rollout whose turns have ended: the next
        ones are another iteration's.
        """
        if self.hold is None or self.hold.phase is not Phase.ROLLOUT or not self.hold.done_turns:
            return False
        return queued is OpKind.PUBLISH and self.is_quiet

    def must_drain(self) -> bool:
        """Whether turns that come from now on belong to the next rollout."""
        rolls = self.hold is not None and self.hold.phase is Phase.ROLLOUT
        return rolls and not self.asks and self.before is None and bool(self.ops and self.turns)

    def drain(self) -> None:
        """They do."""
        self.before = max(self.turns) + 1

    def _draining(self) -> bool:
        before = self.before
        return bool(self.turns) if before is None else any(turn < before for turn in self.turns)

    def turn_opened(self, sequence: int) -> None:
        self.turns.add(sequence)
        self.trains_only = False
        if self.hold is not None and self.before is None:
            self.hold.turns += 1

    def turn_closed(self, sequence: int, now_s: float) -> None:
        self.turns.discard(sequence)
        if self.hold is not None:
            self.hold.done_turns += 1
            self.hold.heard_s = now_s

    def op_over(self, request: RequestId, now_s: float) -> None:
        self.ops.discard(request)
        if self.hold is not None and not self.asks:
            self.hold.heard_s = now_s

    def at_tail(self) -> bool:
        """Whether so many of the rollout's turns are done that the rest fits on a few instances;
        said once.
        """
        hold = self.hold
        if hold is None or hold.phase is not Phase.ROLLOUT or hold.tail_said or not self.turns:
            return False
        whole = max(hold.turns, self.last_turns)
        hold.tail_said = whole >= _LEAST_TURNS and hold.done_turns >= TAIL_SHARE * whole
        return hold.tail_said

    def gate(self, but: tuple[InstanceId, ...] = ()) -> TurnGate:
        """For its turns, as it stands."""
        hold = self.hold
        if hold is None or hold.phase is not Phase.ROLLOUT:
            return TurnGate()
        return TurnGate(hold.nodes, hold.kept, () if hold.kept else but, self.before)

    def begin(self, hold: Hold) -> None:
        """It has a permit."""
        hold.turns = len(self.turns)
        self.hold, self.ask, self.requested_s = hold, None, None
        self.before = None
        if not self.cut_s:
            self.stepped = self.published = False
        self.switches += hold.switch

    def end(self, now_s: float, work_s: float) -> Hold:
        """It has no permit any more; `work_s` above 0 tells how long the phase is."""
        hold = self.hold
        assert hold is not None
        self.hold = self.before = None
        if hold.phase is Phase.ROLLOUT:
            self.last_turns = hold.done_turns or self.last_turns
        else:
            self.trained_s = now_s
        if work_s + self.cut_s > 0:
            self.seen.setdefault(hold.phase, []).append(work_s + self.cut_s)
        self.cut_s = 0.0
        return hold

    def end_cut(self, phase: Phase) -> None:
        """Nothing is left of the phase, which may have been cut."""
        if self.cut_s:
            self.seen.setdefault(phase, []).append(self.cut_s)
        self.cut_s = 0.0

    def cut(self, now_s: float) -> Hold:
        """It has no permit any more, in the middle of a phase."""
        hold = self.hold
        assert hold is not None
        self.hold = self.before = None
        self.cut_s += now_s - hold.since_s
        return hold
