"""Fixed cyclic orders: on every node phases take turns in one sequence.

Execution is then max-plus linear: shorter phases make nothing later. So the worst case that
admission checked bounds every run (WEAVE 4.3 with one turn per job and cycle; a plan may give
several).
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import GroupPlan, Phase
from slackwater.policy.ordering.plan_alignment import Alignment, PlanForecast
from slackwater.policy.ordering.priority import LoadedJob, WaitingPhase
from slackwater.policy.ordering.round_robin_cycle import plan_round_robin


@dataclass(slots=True)
class _PhaseTurn:
    """A phase's turn on a node. `skip`: skip it once, because its job was not at this phase when
    the order began.
    """

    job: JobId
    phase: Phase
    skip: bool = False


@dataclass(slots=True)
class _Cycle:
    """The turns on one node, and the index of the next one."""

    turns: list[_PhaseTurn] = field(default_factory=list)
    next: int = 0

    def is_head(self, job: JobId, phase: Phase) -> bool:
        turn = self.turns[self.next]
        while turn.skip:
            turn.skip = False
            self.step()
            turn = self.turns[self.next]
        return turn.phase is phase and turn.job == job

    def step(self) -> None:
        self.next = (self.next + 1) % len(self.turns)

    def drop(self, job: JobId) -> None:
        before = sum(turn.job == job for turn in self.turns[: self.next])
        self.turns = [turn for turn in self.turns if turn.job != job]
        self.next = (self.next - before) % len(self.turns) if self.turns else 0


class PlannedOrder:
    """Follows the turns of a group's plan, or of a round robin if there is none. It starts at the
    point of the cycle that delays the members least.
    """

    def __init__(self) -> None:
        self._cycles: dict[NodeId, _Cycle] = {}
        self._nodes: dict[JobId, tuple[NodeId, ...]] = {}

    def adopt(self, members: Sequence[LoadedJob], plan: GroupPlan | None) -> None:
        self._nodes = {m.job: (*m.rollout_nodes, *m.train_nodes) for m in members}
        self._cycles = {}
        if not members:
            return
        plan = plan or plan_round_robin(members)
        unplanned = self._nodes.keys() - {slot.job for slot in plan.slots}
        assert not unplanned, f"the plan leaves out {sorted(unplanned)}"
        self._start_cycles(PlanForecast(plan, members).align(members))

    def _start_cycles(self, alignment: Alignment) -> None:
        self._cycles = {}
        for slot, skip in zip(alignment.slots, alignment.skip_first, strict=True):
            for node in slot.nodes:
                turns = self._cycles.setdefault(node, _Cycle()).turns
                turns.append(_PhaseTurn(slot.job, slot.phase, skip))

    def joining_loss_s(
        self, members: Sequence[LoadedJob], plan: GroupPlan | None
    ) -> tuple[float, float]:
        plan = plan or plan_round_robin(members)
        return PlanForecast(plan, members).loss_s(members), plan.period_s

    def leave(self, job: JobId) -> None:
        for node in self._nodes.pop(job, ()):
            if node in self._cycles:
                self._cycles[node].drop(job)
                if not self._cycles[node].turns:
                    del self._cycles[node]

    def pick(
        self, waiting: Iterable[WaitingPhase], free: Callable[[WaitingPhase], bool], now_s: float
    ) -> WaitingPhase | None:
        for request in waiting:
            if self._has_turn(request) and free(request):
                return request
        return None

    def _has_turn(self, request: WaitingPhase) -> bool:
        job, phase, cycles = request.job, request.phase, self._cycles
        for node in request.nodes:  # noqa: SIM110 -- all() takes twice as long, and every event asks.
            if not cycles[node].is_head(job, phase):
                return False
        return True

    def record_start(self, job: JobId, phase: Phase, nodes: Sequence[NodeId]) -> None:
        for node in nodes:
            assert self._cycles[node].is_head(job, phase), f"{job} took another's turn on {node}"
            self._cycles[node].step()

    def jobs(self) -> Container[JobId]:
        return self._nodes


class RoundRobinOrder(PlannedOrder):
    """One rollout and one train phase per job and meta-iteration, whatever the policy planned."""

    def adopt(self, members: Sequence[LoadedJob], plan: GroupPlan | None) -> None:
        super().adopt(members, None)

    def joining_loss_s(
        self, members: Sequence[LoadedJob], plan: GroupPlan | None
    ) -> tuple[float, float]:
        return super().joining_loss_s(members, None)
