"""A balancing policy for tests of moves: it moves running turns without any reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.policy.rollout.balancing import EngineKnowledge, TurnMove
from slackwater.policy.rollout.instance_load import InstanceLoad


@dataclass(frozen=True, slots=True)
class MovingAlways:
    """Every time it is asked, the fullest instance gives up to `count` running turns to the
    emptiest.
    """

    count: int = 2

    def plan_moves(
        self, loads: Sequence[InstanceLoad], known: EngineKnowledge
    ) -> Sequence[TurnMove]:
        del known
        taking = sorted(
            (load for load in loads if load.accepting),
            key=lambda load: (load.in_flight, load.instance),
        )
        if len(taking) < 2 or taking[-1].in_flight == 0:
            return ()
        return (TurnMove(taking[-1].instance, taking[0].instance, self.count, running=True),)
