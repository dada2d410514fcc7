"""One job that the co-scheduler manages: the permit it holds, its open work, and its next phase.

A job whose own code requests permits says which phase it runs. For every other job the phase is
inferred from what its client does (fleet.md, Permits): turns are the rollout phase, passes and
optimizer steps the train phase.

- A rollout ends when an operation waits and the turns opened before it have ended, or when weights
  are published again with no step between: that begins the next iteration.
- A train phase ends when no operation is left and either a turn waits or the step's weights are
  published, or copied and on their way. The rest of publishing is the sync, which needs no trainer.
- If a client goes on training and does neither, each step is an iteration. It runs several in one
  phase while nobody waits and another job holds the nodes of its rollout.
"""

from dataclasses import dataclass, field

from slackwater.control.coschedule.phase_events import PermitAsked
from slackwater.control.rollout.gates import TurnGate
from slackwater.model.ids import InstanceId, JobId, NodeId, RequestId
from slackwater.model.job import JobTerms
from slackwater.model.operation import OpKind
from slackwater.model.placement import Phase

TAIL_SHARE = 0.8  # of a rollout's turns that are done: the rest is its tail
_MIN_TURNS_FOR_TAIL = 5


@dataclass(slots=True)
class HeldPermit:
    """A permit that a job holds.

    `client_number` is the number that the job's own code knows it by: a job that held a permit
    before the control plane restarted keeps using the old number.
    """

    number: int
    client_number: int
    phase: Phase
    nodes: tuple[NodeId, ...]
    started_s: float
    active_s: float  # last report of the holder, or last end of one of its turns or operations
    switch: bool = False
    tail_instances: tuple[InstanceId, ...] | None = None  # set when the rollout shrinks
    tail_reported: bool = False
    turns: int = 0
    done_turns: int = 0
    stepped_s: float | None = None  # when its last optimizer step ended
    longest_step_s: float = 0.0

    def record_step(self, now_s: float) -> None:
        """An optimizer step ended: training can be preempted here."""
        began_s = self.started_s if self.stepped_s is None else self.stepped_s
        self.longest_step_s = max(self.longest_step_s, now_s - began_s)
        self.stepped_s = now_s


@dataclass(slots=True)
class ManagedJob:
    """A job with terms. `epoch` counts its placements; None while it has none."""

    id: JobId
    terms: JobTerms
    epoch: int | None = None
    iteration: int = 0
    requests_permits: bool = False  # its own code does; else its phases are inferred
    permit_request: PermitAsked | None = None
    permit: HeldPermit | None = None
    requested_s: float | None = None  # since when the co-scheduler has a request of it
    turns: set[int] = field(default_factory=set)  # open ones, by sequence number
    ops: set[RequestId] = field(default_factory=set)  # open ones that need a permit
    drain_before: int | None = None  # while a rollout drains, turns from here on wait
    stepped: bool = False
    published: bool = False
    trains_only: bool = False
    continues_training: bool = False  # its next step may be of the same phase: nobody minds
    rest_timer_s: float | None = None
    evicted: bool = False  # lost its place; gets one again when it asks for something
    heartbeat_s: float | None = None  # last heartbeat of its program, if that sends any
    last_rollout_turns: int = 0
    train_ended_s: float | None = None
    idle_since_s: float = 0.0
    switches: int = 0
    strikes: int = 0
    observed_s: dict[Phase, list[float]] = field(default_factory=dict)  # lengths of its phases
    preempted_s: float = 0.0  # length of the pieces of a phase that was preempted and resumes

    @property
    def is_idle(self) -> bool:
        """Whether it neither runs nor waits."""
        return self.permit is None and self.requested_s is None

    @property
    def is_permit_unused(self) -> bool:
        """Whether its client does nothing with the permit that it holds."""
        return (
            self.permit is not None
            and not self.requests_permits
            and not self.turns
            and not self.ops
        )

    def next_phase(self, expected: Phase) -> Phase | None:
        """The phase that it would run next, if it has anything to do."""
        if self.requests_permits:
            return None if self.permit_request is None else self.permit_request.phase
        if self.turns and (expected is Phase.ROLLOUT or not self.ops):
            return Phase.ROLLOUT
        return Phase.TRAIN if self.ops else None

    def is_phase_over(self) -> bool:
        """Whether what its client does ends the phase that it holds a permit for."""
        if self.permit is None or self.requests_permits:
            return False
        if self.permit.phase is Phase.ROLLOUT:
            return bool(self.ops) and not self._has_turns_to_drain()
        if self.stepped and self.trains_only and not self.continues_training:
            return True
        return not self.ops and (bool(self.turns) or (self.stepped and self.published))

    def begins_next_iteration(self, queued: OpKind) -> bool:
        """Whether the operation publishes weights between two rollouts without a step: the next
        turns belong to another iteration.
        """
        permit = self.permit
        if permit is None or permit.phase is not Phase.ROLLOUT or not permit.done_turns:
            return False
        return queued is OpKind.PUBLISH and self.is_permit_unused

    def must_drain(self) -> bool:
        """Whether turns that open from now on belong to the next rollout."""
        rolls_out = self.permit is not None and self.permit.phase is Phase.ROLLOUT
        has_both = bool(self.ops and self.turns)
        return rolls_out and not self.requests_permits and self.drain_before is None and has_both

    def drain(self) -> None:
        """Let only the turns that are open now finish in this rollout."""
        self.drain_before = max(self.turns) + 1

    def _has_turns_to_drain(self) -> bool:
        if self.drain_before is None:
            return bool(self.turns)
        return any(turn < self.drain_before for turn in self.turns)

    def open_turn(self, sequence: int) -> None:
        self.turns.add(sequence)
        self.trains_only = False
        if self.permit is not None and self.drain_before is None:
            self.permit.turns += 1

    def close_turn(self, sequence: int, now_s: float) -> None:
        self.turns.discard(sequence)
        if self.permit is not None:
            self.permit.done_turns += 1
            self.permit.active_s = now_s

    def close_op(self, request: RequestId, now_s: float) -> None:
        self.ops.discard(request)
        if self.permit is not None and not self.requests_permits:
            self.permit.active_s = now_s

    def reaches_tail(self) -> bool:
        """Whether so many turns of the rollout are done that the rest fits on a few instances; True
        once per rollout.
        """
        permit = self.permit
        if permit is None or permit.phase is not Phase.ROLLOUT or not self.turns:
            return False
        if permit.tail_reported:
            return False
        total = max(permit.turns, self.last_rollout_turns)
        enough = total >= _MIN_TURNS_FOR_TAIL and permit.done_turns >= TAIL_SHARE * total
        permit.tail_reported = enough
        return enough

    def turn_gate(self, excluded: tuple[InstanceId, ...] = ()) -> TurnGate:
        """Where its turns may run now, not on the `excluded` instances."""
        permit = self.permit
        if permit is None or permit.phase is not Phase.ROLLOUT:
            return TurnGate()
        tail = permit.tail_instances
        return TurnGate(permit.nodes, tail, () if tail else excluded, self.drain_before)

    def start_phase(self, permit: HeldPermit) -> None:
        permit.turns = len(self.turns)
        self.permit, self.permit_request, self.requested_s = permit, None, None
        self.drain_before = None
        if not self.preempted_s:
            self.stepped = self.published = False
        self.switches += permit.switch

    def end_phase(self, now_s: float, work_s: float) -> HeldPermit:
        """Return the permit of a phase that ended. `work_s` is its length; 0 if it is not known."""
        permit = self._take_permit()
        if permit.phase is Phase.ROLLOUT:
            self.last_rollout_turns = permit.done_turns or self.last_rollout_turns
        else:
            self.train_ended_s = now_s
        self._observe(permit.phase, work_s + self.preempted_s)
        return permit

    def end_preempted_phase(self, phase: Phase) -> None:
        """Nothing is left of the phase, which was over where it was preempted if it ever was."""
        self._observe(phase, self.preempted_s)

    def preempt(self, now_s: float) -> HeldPermit:
        """Return the permit in the middle of a phase."""
        permit = self._take_permit()
        self.preempted_s += now_s - permit.started_s
        return permit

    def _take_permit(self) -> HeldPermit:
        permit = self.permit
        assert permit is not None
        self.permit = self.drain_before = None
        return permit

    def _observe(self, phase: Phase, length_s: float) -> None:
        if length_s > 0:
            self.observed_s.setdefault(phase, []).append(length_s)
        self.preempted_s = 0.0
