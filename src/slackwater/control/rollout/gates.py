"""Gates: where the turns of a job may run while others have the nodes (a phase needs a permit)."""

from dataclasses import dataclass

from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.model.ids import InstanceId, JobId, NodeId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.placement import is_within


@dataclass(frozen=True, slots=True)
class TurnGate:
    """A job's turns run on instances of `nodes`, and beside them on spot and borrowed ones, which
    no permit is for; without nodes they wait.

    `only` and `but` narrow the instances while the tail of one rollout and the next one share
    nodes. Turns numbered `before` or later wait for the next rollout.
    """

    nodes: tuple[NodeId, ...] = ()
    only: tuple[InstanceId, ...] | None = None
    but: tuple[InstanceId, ...] = ()
    before: int | None = None

    def admits(self, spec: InstanceSpec) -> bool:
        """Whether the job's turns may run there."""
        place = spec.place
        if place is None and spec.kind in (InstanceKind.SPOT, InstanceKind.BORROWED):
            return bool(self.nodes)
        if place is None or not any(is_within(place, node) for node in self.nodes):
            return False
        if spec.instance in self.but:
            return False
        return self.only is None or spec.instance in self.only

    def takes(self, turn: LiveTurn) -> bool:
        """Whether the turn came early enough."""
        return self.before is None or turn.sequence < self.before


class Gates:
    """Of all jobs that have one."""

    def __init__(self) -> None:
        self._gates: dict[JobId, TurnGate] = {}

    def set(self, job: JobId, gate: TurnGate | None) -> None:
        if gate is None:
            self._gates.pop(job, None)
        else:
            self._gates[job] = gate

    def admits(self, job: JobId, spec: InstanceSpec) -> bool:
        """Whether a job's turns may run on an instance."""
        gate = self._gates.get(job)
        return gate is None or gate.admits(spec)

    def allows(self, turn: LiveTurn, spec: InstanceSpec) -> bool:
        gate = self._gates.get(turn.spec.job)
        return gate is None or (gate.takes(turn) and gate.admits(spec))

    def takes(self, turn: LiveTurn) -> bool:
        """Whether this turn may run at all now."""
        gate = self._gates.get(turn.spec.job)
        return gate is None or (bool(gate.nodes) and gate.takes(turn))
