"""`slackwater train` killed in the middle goes on as if nothing had happened."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slackwater.rl.run_directory import PromptOrder

from .service_process import ServiceProcess, wait_for

pytestmark = pytest.mark.process

STEPS, PROMPTS = 8, 30
RECIPE = f"""
[environment]
kind = "guess-number"
prompts = {PROMPTS}
[sampling]
max_tokens = 3
[warm_up]
steps = 6
batch = 32
learning_rate = 5e-3
[grpo]
steps = {STEPS}
groups = 4
max_groups = 6
group_size = 4
checkpoint_every = 3
updates = 2
"""


def start(service: ServiceProcess, recipe: Path, run: Path) -> subprocess.Popen[bytes]:
    where = ["--url", service.url, "--key", service.key]
    command = [sys.executable, "-m", "slackwater", "train", str(recipe), "--run", str(run), *where]
    log = run.with_suffix(".log").open("ab")
    with log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / name
    whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    return [json.loads(line) for line in whole.splitlines()]


def finish(process: subprocess.Popen[bytes], run: Path) -> None:
    assert process.wait(240) == 0, run.with_suffix(".log").read_text()[-2000:]


def test_a_run_killed_between_checkpoints_uses_every_prompt_once_and_ends_in_the_same_curve(
    service: ServiceProcess, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    undisturbed, first = start(service, recipe, whole), start(service, recipe, cut)
    try:
        wait_for("step 5", lambda: len(rows(cut, "metrics.jsonl")) >= 5, 240)
        first.send_signal(signal.SIGKILL)
        first.wait(240)
        finish(undisturbed, whole)
    finally:
        for process in (undisturbed, first):
            process.kill()
    assert len(rows(cut, "metrics.jsonl")) < STEPS, "it was killed too late to show anything"
    # On a busy machine a step or two may follow the fifth before the kill.
    assert json.loads((cut / "checkpoint.json").read_text())["steps_done"] in (3, 6)
    finish(start(service, recipe, cut), cut)

    for run in (whole, cut):
        steps = rows(run, "prompts.jsonl")
        assert [row["step"] for row in steps] == list(range(STEPS))
        uses = [(epoch, prompt) for row in steps for epoch, prompt, _ in row["uses"]]
        expected = PromptOrder(PROMPTS, 0).uses(0, len(uses))
        assert uses == [(use.epoch, use.prompt) for use in expected]
        assert len(uses) > PROMPTS  # so an epoch ended on the way
    for name in ("reward", "optim/loss", "answer/tokens"):
        curves = [[row.get(name) for row in rows(run, "metrics.jsonl")] for run in (whole, cut)]
        assert curves[0] == curves[1], name
