"""Live turns by weight version, reported to the weight director when the count changes much."""

from collections import defaultdict
from dataclasses import dataclass

from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.manager_state import ManagerState
from slackwater.control.weights.events import VersionNeeded


@dataclass(slots=True)
class _VersionDemand:
    """Live turns of a version, and their number when it was last reported."""

    turns: int = 0
    reported: int = 0


class Demand:
    """Counts turns by version; reports the first, the last, every doubling and every quartering.

    Were it every halving, turns that come and go would be reported again and again.
    """

    def __init__(self, state: ManagerState) -> None:
        self._state = state
        self._demands: defaultdict[str, _VersionDemand] = defaultdict(_VersionDemand)

    def record_open(self, turn: LiveTurn) -> None:
        """Count a turn that needs its version."""
        demand = self._demands[turn.spec.version]
        demand.turns += 1
        if demand.turns >= 2 * demand.reported:
            self._report(turn, demand)

    def record_close(self, turn: LiveTurn) -> None:
        demand = self._demands[turn.spec.version]
        demand.turns -= 1
        if 4 * demand.turns <= demand.reported:
            self._report(turn, demand)
        if not demand.turns:
            del self._demands[turn.spec.version]

    def report_waiting(self, turn: LiveTurn) -> None:
        """Report a turn that no instance can take."""
        self._report(turn, self._demands[turn.spec.version], waiting=True)

    def _report(self, turn: LiveTurn, demand: _VersionDemand, *, waiting: bool = False) -> None:
        state, spec = self._state, turn.spec
        demand.reported = turns = demand.turns
        state.out.append(
            VersionNeeded(state.now_s, spec.job, spec.base_model, spec.version, turns, waiting)
        )

    def counts(self) -> dict[str, int]:
        """Live turns by version."""
        return {version: demand.turns for version, demand in self._demands.items()}
