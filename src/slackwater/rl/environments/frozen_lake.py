"""Cross the frozen lake of gymnasium, one move a turn; many turns."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from slackwater.rl.environments.episode import Reply, at_least

MOVES = {"L": 0, "D": 1, "R": 2, "U": 3}


@dataclass(frozen=True, slots=True)
class FrozenLake:
    """The model sees the map with itself as `*` and answers L, D, R or U.

    Reaching the goal earns 1. `step_reward` is earned by each move that is valid, safe and new, up to the goal's
    distance, so that there is something to learn before the first success. The map is random for each prompt
    (`size` x `size`, always solvable), or one fixed map for all (`fixed_map`).
    """

    kind: Literal["frozen-lake"] = "frozen-lake"
    prompts: int = 2000
    size: int = 4
    frozen_share: float = 0.8
    fixed_map: bool = False
    slippery: bool = False
    max_turns: int = 12
    step_reward: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("environment.prompts", self.prompts, 1)
        at_least("environment.size", self.size, 2)
        at_least("environment.max_turns", self.max_turns, 1)

    def episode(self, prompt: int) -> "_Crossing":
        return _Crossing(self, prompt)

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        """A random walk."""
        episode, turns = self.episode(prompt), []
        observation = episode.first_observation
        walk = np.random.default_rng([self.seed, prompt, 1])
        while True:
            move = str(walk.choice(list(MOVES)))
            turns.append((observation, move))
            reply = episode.answer(move)
            if reply.done:
                return tuple(turns)
            observation = reply.observation


class _Crossing:
    def __init__(self, rules: FrozenLake, prompt: int) -> None:
        import gymnasium
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        map_seed = rules.seed if rules.fixed_map else rules.seed + prompt
        self._rules = rules
        self._map: list[str] = generate_random_map(rules.size, rules.frozen_share, map_seed)
        self._lake: Any = gymnasium.make(
            "FrozenLake-v1",
            desc=self._map,
            is_slippery=rules.slippery,
            max_episode_steps=rules.max_turns,
        )
        self._position = int(self._lake.reset(seed=rules.seed + prompt)[0])
        self._visited = {self._position}
        self.first_observation = self._show()

    def answer(self, text: str) -> Reply:
        move = MOVES.get(text.strip().upper())
        if move is None:
            return Reply("", 0.0, True)
        position, reward, ended, cut, _ = self._lake.step(move)
        self._position = int(position)
        fell = bool(ended) and not reward
        steps_paid = len(self._visited) - 1
        new = self._position not in self._visited and not fell
        self._visited.add(self._position)
        if new and steps_paid < 2 * (self._rules.size - 1):
            reward = float(reward) + self._rules.step_reward
        done = bool(ended or cut)
        return Reply("" if done else self._show(), float(reward), done)

    def _show(self) -> str:
        row, column = divmod(self._position, self._rules.size)
        lines = list(self._map)
        lines[row] = f"{lines[row][:column]}*{lines[row][column + 1 :]}"
        return "/".join(lines) + ">"
