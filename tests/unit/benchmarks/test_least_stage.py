"""The bound on a rollout stage."""

import pytest

from benchmarks.rollout.simulated.agent_run import AgentFleet, run_agents
from benchmarks.serving.simulated.least_stage import least_stage_s
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.sim.rollout.agent_trace import draw_games
from slackwater.sim.rollout.engine_cost import H800, QWEN3_8B, EngineCost

FLEET = AgentFleet(EngineCost(QWEN3_8B, H800, 1), 2)


@pytest.mark.parametrize("seed", range(3))
def test_a_trajectory_by_itself_takes_what_the_bound_says(seed: int) -> None:
    (game,) = draw_games(1, seed)
    took_s = run_agents(FLEET, RolloutSettings(), [game]).seconds
    assert least_stage_s([game], FLEET, 4.0) == pytest.approx(took_s, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_no_stage_is_shorter(seed: int) -> None:
    games = draw_games(40, seed)
    took_s = run_agents(FLEET, RolloutSettings(), games).seconds
    assert 0.6 * took_s < least_stage_s(games, FLEET, 0.0) < took_s
