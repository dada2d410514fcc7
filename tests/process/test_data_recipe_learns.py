"""A data set with a verifier and a KL to the base model teaches SmolLM2-135M, in two trackers.

Takes some minutes, so it runs with `make data-recipe` only.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        "SLACKWATER_RECIPES" not in os.environ,
        reason="make data-recipe sets SLACKWATER_RECIPES to a model",
    ),
]
STEPS = 12
VERIFIER = """
def number(text, row):
    said, wanted = text.strip(), row["answer"]
    if said == wanted:
        return 1.0
    return 0.5 * sum(a == b for a, b in zip(said, wanted)) / max(len(said), len(wanted), 1)
"""
SETTINGS = (
    *("sampling.max_tokens=6", "model.lora_rank=8", f"grpo.steps={STEPS}", "grpo.groups=6"),
    *("grpo.max_groups=6", "grpo.group_size=6", "grpo.learning_rate=3e-4"),
    *("warm_up.steps=6", "warm_up.batch=8", "warm_up.learning_rate=1e-3"),
    "environment.instruction=Answer with the number only. ",
)


@pytest.mark.timeout(3600)
def test_the_reward_rises_and_both_trackers_have_its_curve(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(21) for b in range(21)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums_verifier.py").write_text(VERIFIER)
    command = [sys.executable, "-m", "slackwater", "train", "verified-data", "--up"]
    command += ["--data", "sums.jsonl", "--verifier", "sums_verifier:number", "--kl", "0.02"]
    command += ["--track", "tensorboard,mlflow", "--run", "run"]
    command += ["--model", str(Path(os.environ["SLACKWATER_RECIPES"]).resolve())]
    for setting in SETTINGS:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=tmp_path, timeout=3400, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    curve = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in curve]
    print("rewards", [round(reward, 3) for reward in rewards])
    print("reference/kl", [round(row.get("reference/kl", 0.0), 3) for row in curve])
    assert len(rewards) == STEPS
    assert statistics.mean(rewards[-4:]) > statistics.mean(rewards[:4])
    assert_equal_curves(run, ("reward", "reference/kl", "optim/loss"))


def assert_equal_curves(run: Path, names: tuple[str, ...]) -> None:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    client = MlflowClient(tracking_uri=f"sqlite:///{run}/mlflow.db")
    known = json.loads((run / "trackers.json").read_text())["mlflow"]
    for name in names:
        shown = {point.step: point.value for point in events.Scalars(name)}
        other = {point.step: point.value for point in client.get_metric_history(known, name)}
        assert len(shown) == STEPS
        assert other == pytest.approx(shown, rel=1e-6)  # TensorBoard keeps 32 bits
