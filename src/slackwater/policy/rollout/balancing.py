"""Which turns move between instances (RLBoost Algorithm 2, CONTINUOUSLB), and baselines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slackwater.model.ids import InstanceId
from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.step_time import StepTime


@dataclass(frozen=True, slots=True)
class TurnMove:
    """Move up to `count` turns from `source` to `target`: running ones or pending ones."""

    source: InstanceId
    target: InstanceId
    count: int
    running: bool


@dataclass(frozen=True, slots=True)
class EngineKnowledge:
    """What was learned about the engines: `plateau`, the batch size beyond which throughput hardly
    grows, and the time of a step.
    """

    plateau: int | None = None
    step_time: StepTime | None = None


class BalancingPolicy(Protocol):
    """Called from time to time; returns the turns to move between instances."""

    def plan_moves(
        self, loads: Sequence[InstanceLoad], known: EngineKnowledge
    ) -> Sequence[TurnMove]: ...


@dataclass(frozen=True, slots=True)
class NoBalancing:
    """Baseline: turns are never moved."""

    def plan_moves(
        self, loads: Sequence[InstanceLoad], known: EngineKnowledge
    ) -> Sequence[TurnMove]:
        return ()


@dataclass(frozen=True, slots=True)
class FillIdle:
    """RLBoost: pending turns move one by one from the fullest instance to one without pending
    turns, until that is saturated. If no turn is pending, the running turns beyond the plateau move
    from the busiest instance to an idle one. One call does what the paper's monitor loop does until
    it finds nothing more to move.
    """

    def plan_moves(
        self, loads: Sequence[InstanceLoad], known: EngineKnowledge
    ) -> Sequence[TurnMove]:
        accepting = sorted(
            (load for load in loads if load.accepting), key=lambda load: load.instance
        )
        if any(load.pending for load in accepting):
            return self._plan_pending_moves(accepting)
        return (
            self._plan_running_moves(accepting, known.plateau) if known.plateau is not None else ()
        )

    @staticmethod
    def _plan_pending_moves(accepting: Sequence[InstanceLoad]) -> list[TurnMove]:
        pending = {load.instance: load.pending for load in accepting}
        room = {
            load.instance: load.max_running - load.in_flight
            for load in accepting
            if not load.pending
        }
        space = {load.instance: load.kv_tokens - load.kv_load_tokens for load in accepting}
        context = {
            load.instance: load.kv_load_tokens // max(load.executing, 1) for load in accepting
        }
        moved: dict[tuple[InstanceId, InstanceId], int] = {}
        while room:
            source = max(pending, key=lambda name: (pending[name], name))
            target = max(room, key=lambda name: (space[name], name))
            if pending[source] == 0:
                break
            if room[target] <= 0 or space[target] < context[source]:
                del room[target]  # saturated: the next turn would queue there
                continue
            moved[source, target] = moved.get((source, target), 0) + 1
            pending[source] -= 1
            room[target] -= 1
            space[target] -= context[source]
        return [TurnMove(*pair, count, running=False) for pair, count in moved.items()]

    @staticmethod
    def _plan_running_moves(accepting: Sequence[InstanceLoad], plateau: int) -> list[TurnMove]:
        executing = {load.instance: load.executing for load in accepting}
        moves: list[TurnMove] = []
        for idle in (load for load in accepting if load.in_flight == 0):
            busiest = max(executing, key=lambda name: (executing[name], name))
            excess = min(executing[busiest] - plateau, idle.max_running)
            if excess <= 0:
                break
            executing[busiest] -= excess
            moves.append(TurnMove(busiest, idle.instance, excess, running=True))
        return moves


@dataclass(frozen=True, slots=True)
class EvenSteps:
    """Make the decode steps of all instances equally long, since the slowest instance ends the RL
    step.

    Pending turns move to instances that can run them now. Running turns move from the instance with
    the longest decode step to the one with the shortest, while these differ by more than
    `tolerance`. Their number follows from the cost of a step per turn and per context token. Idle
    instances are the extreme case: spreading the last turns shortens their steps. `pairs` pairs of
    instances, and `most_moves` turns for each, limit the prefill work of one call.
    """

    tolerance: float = 0.15
    most_moves: int = 16
    pairs: int = 4

    def plan_moves(
        self, loads: Sequence[InstanceLoad], known: EngineKnowledge
    ) -> Sequence[TurnMove]:
        accepting = [load for load in loads if load.accepting]
        pending = self._plan_pending_moves(accepting)
        if pending or known.step_time is None:
            return pending
        return self._plan_running_moves(accepting, known.step_time)

    def _plan_pending_moves(self, accepting: Sequence[InstanceLoad]) -> list[TurnMove]:
        full = sorted(
            (load for load in accepting if load.pending),
            key=lambda load: (-load.pending, load.instance),
        )
        hungry = sorted(
            (load for load in accepting if _can_receive(load)),
            key=lambda load: (load.kv_load_tokens / load.kv_tokens, load.instance),
        )
        return [
            TurnMove(
                source.instance,
                target.instance,
                min(
                    (source.pending + 1) // 2,
                    target.max_running - target.in_flight,
                    self.most_moves,
                ),
                running=False,
            )
            for source, target in zip(full[: self.pairs], hungry, strict=False)
        ]

    def _plan_running_moves(
        self, accepting: Sequence[InstanceLoad], step_time: StepTime
    ) -> list[TurnMove]:
        def step_s(load: InstanceLoad) -> float:
            return load.slowness * step_time.step_s(load.executing, load.kv_load_tokens)

        by_step = sorted(accepting, key=lambda load: (step_s(load), load.instance))
        moves: list[TurnMove] = []
        for target, source in zip(by_step[: self.pairs], reversed(by_step), strict=False):
            gap_s = step_s(source) - step_s(target)
            if source.executing < 2 or gap_s <= self.tolerance * step_s(source):
                break
            context = source.kv_load_tokens / source.executing
            one_turn_s = step_time.per_turn_s + step_time.per_token_s * context
            shift_s = (source.slowness + target.slowness) * one_turn_s
            count = min(round(gap_s / shift_s) if shift_s > 0 else 0, source.executing // 2)
            count = min(count, self.most_moves, target.max_running - target.in_flight)
            if count > 0:
                moves.append(TurnMove(source.instance, target.instance, count, running=True))
        return moves


def _can_receive(load: InstanceLoad) -> bool:
    """Whether an instance can start more turns now. A borrowed one may have no memory at the
    moment.
    """
    return not load.pending and load.in_flight < load.max_running and load.kv_tokens > 0
