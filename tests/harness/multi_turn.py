"""A multi-turn workload whose every token is determined: trajectories of turns with made-up
observations.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from harness.live_fleet import BASE, BASE_VERSION, JOB
from slackwater.control.rollout.commands import CompleteTurn
from slackwater.model.ids import TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec

Generate = Callable[[TurnSpec], Awaitable[CompleteTurn]]
Outputs = dict[TurnId, CompleteTurn]


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """`trajectories` x `turns`; a turn's prompt is all before it plus an observation drawn from the
    seed.

    Responses end at `stop_token` or after `max_tokens`, so their lengths differ as real ones do.
    """

    seed: int
    trajectories: int = 64
    turns: int = 4
    max_tokens: int = 120
    observation_tokens: int = 12
    vocabulary: int = 256
    stop_token: int = 7

    @property
    def total_turns(self) -> int:
        return self.trajectories * self.turns

    async def run(self, generate: Generate) -> Outputs:
        """All trajectories at once, each turn after the one before."""
        outputs: Outputs = {}
        async with asyncio.TaskGroup() as group:
            for number in range(self.trajectories):
                group.create_task(self._trajectory(number, generate, outputs))
        return outputs

    async def _trajectory(self, number: int, generate: Generate, outputs: Outputs) -> None:
        rng = np.random.default_rng((self.seed, number))
        context: list[int] = []
        for turn in range(self.turns):
            observation = rng.integers(10, self.vocabulary, self.observation_tokens)
            context += observation.tolist()
            spec = TurnSpec(
                turn=TurnId(f"{number}/{turn}"),
                trajectory=TrajectoryId(str(number)),
                job=JOB,
                base_model=BASE,
                prompt=tuple(context),
                sampling=Sampling(
                    max_tokens=self.max_tokens,
                    seed=int(rng.integers(2**31)),
                    stop_token_ids=(self.stop_token,),
                ),
                version=BASE_VERSION,
            )
            result = await generate(spec)
            outputs[spec.turn] = result
            context += result.tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the turns of a disturbed run differ from those of an undisturbed one."""

    different_turns: int
    lost_tokens: int
    duplicated_tokens: int
    different_logprobs: int


def compare(wanted: Outputs, got: Outputs) -> Comparison:
    """Turn by turn, token by token."""
    pairs = [(wanted[name], got.get(name)) for name in wanted]
    lengths = [(len(a.tokens), 0 if b is None else len(b.tokens)) for a, b in pairs]
    return Comparison(
        different_turns=sum(b is None or list(a.tokens) != list(b.tokens) for a, b in pairs),
        lost_tokens=sum(max(want - have, 0) for want, have in lengths),
        duplicated_tokens=sum(max(have - want, 0) for want, have in lengths),
        different_logprobs=sum(b is None or list(a.logprobs) != list(b.logprobs) for a, b in pairs),
    )
