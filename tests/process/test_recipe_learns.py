"""The cookbook's arithmetic recipe, unmodified, teaches a real model: SmolLM2-135M.

Takes some minutes, so it runs with `make recipes` only. The renderer's stop string has four tokens
of this model, so that with the recipe's five tokens an answer is never ended as it should be: every
reward is 0.1 less than the share of right sums.
"""

import os
import statistics
from contextlib import closing
from pathlib import Path

import pytest

from harness.ports import free_port

from .cookbook import MODEL_NAME, Workspace
from .service_process import ServiceProcess

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        "SLACKWATER_RECIPES" not in os.environ,
        reason="make recipes sets SLACKWATER_RECIPES to a model",
    ),
]
STEPS = 20


@pytest.mark.timeout(3600)
def test_arithmetic_rewards_rise_with_a_real_model(tmp_path: Path) -> None:
    model = Path(os.environ["SLACKWATER_RECIPES"]).resolve()
    service = ServiceProcess(
        tmp_path / "state", model, free_port(), "--model", f"{MODEL_NAME}={model}", "--threads", "2"
    )
    service.start()
    try:
        made = Workspace.make(tmp_path / "work", model, service.url, service.key)
        with closing(made) as workspace:
            rows = workspace.run(
                "math_rl.train",
                "learns",
                within_s=3000,
                env="arithmetic",
                model_name=MODEL_NAME,
                renderer_name="role_colon",
                lora_rank=16,
                groups_per_batch=16,
                group_size=16,
                learning_rate=4e-4,
                max_tokens=5,
                eval_every=0,
                save_every=0,
                max_steps=STEPS,
                behavior_if_log_dir_exists="delete",
            )
    finally:
        service.stop()
    rewards = [row["env/all/reward/total"] for row in rows]
    print("rewards", [round(reward, 3) for reward in rewards])
    assert len(rewards) == STEPS
    first, last = rewards[:4], rewards[-4:]
    spread = max(statistics.stdev(first), statistics.stdev(last))
    rise = statistics.mean(last) - statistics.mean(first)
    assert rise > 0.2, rewards
    assert rise > 2 * spread, rewards  # four standard errors of a mean of four
