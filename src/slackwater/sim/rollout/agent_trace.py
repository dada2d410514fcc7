"""Multi-turn agents, and those of short games (FrozenLake and ALFWorld in ROSE 2.2, 6)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One request of a session, and how long its environment takes afterwards."""

    prompt_tokens: int
    output_tokens: int
    pause_s: float


Session = tuple[AgentTurn, ...]

_MAX_CONTEXT_TOKENS = 32_768


def draw_games(count: int, seed: int | Sequence[int]) -> list[Session]:
    """`count` trajectories of many short turns: three quarters of their tokens are prompts and
    observations (ROSE: 77 %), turns follow within seconds, and a few games last far longer.
    """
    rng = np.random.default_rng(seed)
    sessions: list[Session] = []
    for _ in range(count):
        prompt = int(rng.uniform(1000, 2000))
        turns: list[AgentTurn] = []
        for _ in range(1 + int(min(rng.lognormal(np.log(11), 0.7), 60))):
            output = 1 + int(min(rng.lognormal(np.log(160), 0.8), 3000))
            if prompt + output >= _MAX_CONTEXT_TOKENS:
                break
            turns.append(AgentTurn(prompt, output, float(rng.exponential(1.5))))
            prompt += output + 1 + int(rng.exponential(650))
        sessions.append(tuple(turns))
    return sessions
