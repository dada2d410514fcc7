"""The cookbook's arithmetic recipe, unmodified, teaches a real model: SmolLM2-135M.

Takes some minutes, so it runs with `make recipes` only.
"""

import os
from pathlib import Path

import pytest

from .conftest import free_port
from .cookbook import MODEL_NAME, Workspace
from .service_process import ServiceProcess

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        "SLACKWATER_RECIPES" not in os.environ,
        reason="make recipes sets SLACKWATER_RECIPES to a model",
    ),
]
STEPS = 14


@pytest.mark.timeout(3600)
def test_arithmetic_rewards_rise_with_a_real_model(tmp_path: Path) -> None:
    model = Path(os.environ["SLACKWATER_RECIPES"])
    service = ServiceProcess(
        tmp_path / "state", model, free_port(), "--model", f"{MODEL_NAME}={model}", "--threads", "2"
    )
    service.start()
    try:
        workspace = Workspace.make(tmp_path / "work", model, service.url, service.key)
        rows = workspace.run(
            "math_rl.train",
            "learns",
            within_s=3000,
            env="arithmetic",
            model_name=MODEL_NAME,
            renderer_name="role_colon",
            lora_rank=16,
            groups_per_batch=8,
            group_size=8,
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
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
