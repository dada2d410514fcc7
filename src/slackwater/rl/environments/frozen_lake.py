"""Cross the frozen lake of gymnasium, one move a turn; many turns."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from slackwater.rl.environments.episode import EnvironmentReply, check_at_least, play_blindly

MOVES = {"L": 0, "D": 1, "R": 2, "U": 3}


@dataclass(frozen=True, slots=True)
class FrozenLake:
    """The model sees the map with itself as `*` and answers L, D, R or U.

    Reaching the goal earns 1. Each move that comes closer than any before, by the shortest safe
    path, earns `step_reward`, which gives a signal before the first success. The map is random per
    prompt (`size` x `size`, always solvable), or one `fixed_map` for all.
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
        check_at_least("environment.prompts", self.prompts, 1)
        check_at_least("environment.size", self.size, 2)
        check_at_least("environment.max_turns", self.max_turns, 1)

    def episode(self, prompt: int) -> "_Crossing":
        return _Crossing(self, prompt)

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        """A random walk."""
        walk = np.random.default_rng([self.seed, prompt, 1])
        return play_blindly(self.episode(prompt), lambda: str(walk.choice(list(MOVES))))


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
        self._distances = _distances_to_goal(self._map)
        self._nearest = self._distances[self._position]
        self.first_observation = self._show()

    def answer(self, text: str) -> EnvironmentReply:
        move = MOVES.get(text.strip().upper())
        if move is None:
            return EnvironmentReply("", 0.0, True)
        position, reward, terminated, truncated, _ = self._lake.step(move)
        self._position = int(position)
        distance = self._distances.get(self._position, self._nearest)
        if distance < self._nearest:
            self._nearest = distance
            reward = float(reward) + self._rules.step_reward
        done = bool(terminated or truncated)
        return EnvironmentReply("" if done else self._show(), float(reward), done)

    def _show(self) -> str:
        row, column = divmod(self._position, self._rules.size)
        lines = list(self._map)
        lines[row] = f"{lines[row][:column]}*{lines[row][column + 1 :]}"
        return "/".join(lines) + ">"


def _distances_to_goal(lake: list[str]) -> dict[int, int]:
    """Steps to the goal from every place with a safe path; places in gymnasium's numbering."""
    size, cells = len(lake), "".join(lake)
    goal = cells.index("G")
    distances, frontier = {goal: 0}, [goal]
    for cell in frontier:
        row, column = divmod(cell, size)
        for next_row, next_column in (
            (row, column - 1),
            (row + 1, column),
            (row, column + 1),
            (row - 1, column),
        ):
            neighbor = next_row * size + next_column
            inside = 0 <= next_row < size and 0 <= next_column < size
            if inside and neighbor not in distances and cells[neighbor] != "H":
                distances[neighbor] = distances[cell] + 1
                frontier.append(neighbor)
    return distances
