"""Gates: where a job's turns may run while jobs share nodes by permits."""

from dataclasses import dataclass

from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.model.ids import InstanceId, JobId, NodeId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.placement import is_within


@dataclass(frozen=True, slots=True)
class TurnGate:
    """A job's turns run on instances of `nodes`, and on spot and borrowed instances, which need no
    permit; without nodes they wait.

    `only` and `but` narrow the instances while the tail of one rollout and the next rollout share
    nodes. Turns with a `sequence` of `before` or above wait for the next rollout.
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
        """Whether the turn belongs to the present rollout."""
        return self.before is None or turn.sequence < self.before


class Gates:
    """The gates of all jobs that have one."""

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
