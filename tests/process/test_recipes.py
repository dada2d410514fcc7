"""Unmodified recipes of `tinker-cookbook` against a real service.

The model is tiny and random, so these show that the recipes run and resume; that a real model
learns from them is shown by `make recipes`.
"""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from harness.ports import free_port

from .cookbook import MODEL_NAME, Workspace
from .service_process import ServiceProcess, wait_for

pytestmark = pytest.mark.process

ARITHMETIC = {
    "env": "arithmetic",
    "model_name": MODEL_NAME,
    "renderer_name": "role_colon",
    "lora_rank": 4,
    "groups_per_batch": 4,
    "group_size": 4,
    "learning_rate": 1e-3,
    "eval_every": 0,
    "save_every": 1,
    "behavior_if_log_dir_exists": "delete",
}


def with_context(model: Path, copy: Path, tokens: int) -> Path:
    """The same model for longer conversations: it reads bytes, so they have many tokens."""
    shutil.copytree(model, copy)
    config = copy / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "max_position_embeddings": tokens}))
    return copy


@pytest.fixture(scope="module")
def workspace(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    folder = tmp_path_factory.mktemp("recipes")
    model = with_context(tiny_model, folder / "model", tokens=8192)
    service = ServiceProcess(folder / "state", model, free_port(), name=MODEL_NAME)
    service.start()
    with closing(Workspace.make(folder / "work", model, service.url, service.key)) as made:
        yield made
    service.stop()


@pytest.mark.timeout(900)
def test_arithmetic_runs_off_policy_and_synchronously_with_a_kl_after_the_step(
    workspace: Workspace,
) -> None:
    """Beside each other: most of a recipe's time is its start."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(
            workspace.run,
            "math_rl.train",
            "off-policy",
            within_s=400,
            max_steps=3,
            max_steps_off_policy=1,
            num_substeps=2,
            **ARITHMETIC,
        )
        after = workspace.run(
            "math_rl.train",
            "post-kl",
            within_s=400,
            max_steps=2,
            compute_post_kl=True,
            **ARITHMETIC,
        )
        off_policy = other.result()
    assert len(off_policy) >= 2
    assert len(after) == 2
    assert all("env/all/reward/total" in row for row in after)
    assert any("kl_pre_post" in key for row in after for key in row), sorted(after[0])


@pytest.mark.timeout(900)
def test_arithmetic_resumes_after_a_kill_where_it_was(workspace: Workspace) -> None:
    settings = {**ARITHMETIC, "behavior_if_log_dir_exists": "resume", "max_steps": 5}
    saved = workspace.folder / "killed" / "checkpoints.jsonl"
    with workspace.running("math_rl.train", "killed", **settings):
        wait_for("two checkpoints", lambda: saved.exists() and saved.read_text().count("\n") >= 2)
    # The recipe saves a step before it writes the step's metrics: the kill may fall between the
    # two.
    done = json.loads(saved.read_text().splitlines()[-1])["batch"]
    before = len(workspace.metrics("killed"))
    assert done - 1 <= before <= done
    rows = workspace.run("math_rl.train", "killed", within_s=400, **settings)
    assert [row["step"] for row in rows[before:]] == list(range(done, 5))
    assert "resum" in workspace.tail("killed", lines=2000).lower()


@pytest.mark.timeout(900)
def test_guess_number_and_the_plain_loop_run(workspace: Workspace) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(
            workspace.run,
            "multiplayer_rl.guess_number.train",
            "guess",
            within_s=400,
            model_name=MODEL_NAME,
            renderer_name="role_colon",
            group_size=2,
            batch_size=2,
            max_tokens=8,
            max_steps=1,
            eval_every=0,
            behavior_if_log_dir_exists="delete",
        )
        loop = workspace.run(
            "rl_loop",
            "loop",
            within_s=400,
            model_name=MODEL_NAME,
            batch_size=4,
            group_size=4,
            max_tokens=8,
            max_steps=2,
        )
        guesses = other.result()
    assert len(guesses) >= 1
    assert len(loop) >= 2
