"""How many live turns ask for which version: told to the weight director when it changes much."""

from collections import defaultdict
from dataclasses import dataclass

from slackwater.control.rollout.commands import RolloutCommand
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.weights.events import VersionNeeded


@dataclass(slots=True)
class _Asked:
    turns: int = 0
    told: int = 0


class Demand:
    """Counts turns by version; reports the first, the last, and every doubling and halving."""

    def __init__(self) -> None:
        self._asked: defaultdict[str, _Asked] = defaultdict(_Asked)

    def opened(self, turn: LiveTurn, now_s: float, out: list[RolloutCommand]) -> None:
        """One more turn asks for its version."""
        asked = self._asked[turn.spec.version]
        asked.turns += 1
        if asked.turns >= 2 * asked.told:
            self._tell(turn, asked, now_s, out)

    def closed(self, turn: LiveTurn, now_s: float, out: list[RolloutCommand]) -> None:
        asked = self._asked[turn.spec.version]
        asked.turns -= 1
        if 2 * asked.turns <= asked.told:
            self._tell(turn, asked, now_s, out)
        if not asked.turns:
            del self._asked[turn.spec.version]

    def waits(self, turn: LiveTurn, now_s: float, out: list[RolloutCommand]) -> None:
        """A turn finds nobody to take it."""
        self._tell(turn, self._asked[turn.spec.version], now_s, out, waiting=True)

    @staticmethod
    def _tell(
        turn: LiveTurn,
        asked: _Asked,
        now_s: float,
        out: list[RolloutCommand],
        *,
        waiting: bool = False,
    ) -> None:
        spec = turn.spec
        asked.told = asked.turns
        need = (spec.job, spec.base_model, spec.version, asked.turns, waiting)
        out.append(VersionNeeded(now_s, *need))

    def counts(self) -> dict[str, int]:
        """Live turns by version."""
        return {version: asked.turns for version, asked in self._asked.items()}
