"""What trajectories ask of their environments: think, act, think, act, and a reward at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slackwater.model.amounts import Efficiency
from slackwater.model.errors import ConfigError
from slackwater.sim.inputs.csv_rows import read_rows

TOOL, REWARD = "tool", "reward"


@dataclass(frozen=True, slots=True)
class Step:
    """The model thinks for `think_s`, then an action takes `work_s` on one core; a reward can use
    more.
    """

    think_s: float
    kind: str
    work_s: float


@dataclass(frozen=True, slots=True)
class CodingWorkload:
    """What is known of AI coding (ARL-Tangram 2.4, 6.1, 6.4, and public traces of coding agents).

    Turns as in public SWE-bench sessions (32 on average); thinking as in public SWE-rebench
    sessions (median 3.6 s, mean 5.6 s); tool calls with the median of those (40 ms) and a first
    percentile of 1 ms, the paper's shortest; a test suite of a minute on one core, with a long
    tail. Only rewards can be split over cores, up to 32, with `parallel_share` of their work.
    """

    turns_mean: float = 32.0
    turns_most: int = 100
    think_median_s: float = 3.6
    think_sigma: float = 0.95
    tool_median_s: float = 0.04
    tool_sigma: float = 1.6
    reward_mean_s: float = 60.0
    reward_sigma: float = 1.0
    parallel_share: float = 0.98
    most_cores: int = 32
    memory_mib: int = 4096

    @property
    def efficiency(self) -> Efficiency:
        return Efficiency.amdahl(self.parallel_share, self.most_cores)

    def draw(self, count: int, seed: int) -> list[tuple[Step, ...]]:
        """So many trajectories from a seed."""
        rng = np.random.default_rng(seed)
        return [self._trajectory(rng) for _ in range(count)]

    def _trajectory(self, rng: np.random.Generator) -> tuple[Step, ...]:
        turns = min(1 + int(rng.poisson(rng.gamma(4.0, self.turns_mean / 4.0))), self.turns_most)
        think = self.think_median_s * np.exp(self.think_sigma * rng.standard_normal(turns + 1))
        tool = self.tool_median_s * np.exp(self.tool_sigma * rng.standard_normal(turns))
        tools = [
            Step(float(t), TOOL, float(np.clip(w, 0.001, 120.0)))
            for t, w in zip(think[:-1], tool, strict=True)
        ]
        return (*tools, Step(float(think[-1]), REWARD, self.reward_s(rng)))

    def reward_s(self, rng: np.random.Generator) -> float:
        """One reward's work on one core: a long tail, cut at twenty times the mean."""
        mu = np.log(self.reward_mean_s) - self.reward_sigma**2 / 2
        return float(min(rng.lognormal(mu, self.reward_sigma), 20 * self.reward_mean_s))


@dataclass(frozen=True, slots=True)
class _Turn:
    session: str
    turn: int
    llm_s: float
    tool_s: float = 0.0
    gap_s: float = 0.0


def traced(path: Path, workload: CodingWorkload, count: int, seed: int) -> list[tuple[Step, ...]]:
    """Trajectories with the thinking and tool times of a public trace, and a drawn reward at the
    end.
    """
    sessions: dict[str, list[_Turn]] = {}
    for row in read_rows(path, _Turn, ignore_other_columns=True):
        sessions.setdefault(row.session, []).append(row)
    if not sessions:
        raise ConfigError.of("file", str(path), "must hold a session")
    rng = np.random.default_rng(seed)
    names = sorted(sessions)
    found: list[tuple[Step, ...]] = []
    for pick in rng.integers(len(names), size=count):
        rows = sorted(sessions[names[int(pick)]], key=lambda row: row.turn)
        steps = [_step(row) for row in rows]
        found.append((*steps, Step(1.0, REWARD, workload.reward_s(rng))))
    return found


def _step(row: _Turn) -> Step:
    return Step(max(row.llm_s, 0.0), TOOL, float(np.clip(row.tool_s or row.gap_s, 0.001, 600.0)))


def total_work_s(trajectories: Sequence[Sequence[Step]]) -> float:
    """Core-seconds in all, each action on one core."""
    return sum(step.work_s for steps in trajectories for step in steps)
