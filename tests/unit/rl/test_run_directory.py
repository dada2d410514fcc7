"""What a run leaves on disk, and what a resumed run makes of it."""

import json
from pathlib import Path

import pytest

from slackwater.model.errors import ConfigError
from slackwater.rl.recipe import Recipe, load_recipe, recipe_names
from slackwater.rl.run_directory import PromptUse, RunCheckpoint, RunDirectory

RECIPE = load_recipe("copy-digits")


def record(files: RunDirectory, steps: range) -> None:
    for step in steps:
        files.record(step, {"reward": step / 10}, [(PromptUse(0, step), True)])


def test_a_resumed_run_forgets_the_steps_behind_its_checkpoint(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run", RECIPE)
    record(first, range(3))
    first.keep(RunCheckpoint(3, 3, "tinker://m/weights/a"))
    record(first, range(3, 5))
    first.close()
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # killed while it wrote
    second = RunDirectory(tmp_path / "run", RECIPE)
    assert second.checkpoint == RunCheckpoint(3, 3, "tinker://m/weights/a")
    assert [row["step"] for row in second.metrics()] == [0, 1, 2]
    record(second, range(3, 6))
    second.close()
    uses = (tmp_path / "run/prompts.jsonl").read_text().splitlines()
    assert [json.loads(line)["uses"] for line in uses] == [[[0, step, 1]] for step in range(6)]


def test_without_a_checkpoint_a_run_begins_again(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run", RECIPE)
    record(first, range(2))
    first.close()
    second = RunDirectory(tmp_path / "run", RECIPE)
    second.close()
    assert second.checkpoint is None
    assert second.metrics() == []


def test_curves_open_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = RunDirectory(tmp_path / "run", RECIPE)
    record(files, range(4))
    files.close()
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    points = [(point.step, round(point.value, 3)) for point in events.Scalars("reward")]
    assert points == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]


def test_another_recipe_may_not_continue_a_run_but_a_longer_one_may(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path / "run", RECIPE)
    files.keep(RunCheckpoint(1, 1, "tinker://m/weights/a"))
    files.close()
    RunDirectory(tmp_path / "run", load_recipe("copy-digits", ["grpo.steps=999"])).close()
    with pytest.raises(ConfigError, match="contains a run with another grpo"):
        RunDirectory(tmp_path / "run", load_recipe("copy-digits", ["grpo.seed=7"]))
    assert RunDirectory(tmp_path / "run", RECIPE).checkpoint is not None


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_the_package_loads(name: str) -> None:
    assert isinstance(load_recipe(name), Recipe)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("grpo.group_size=1", "grpo.group_size: 1 must be at least 2"),
        ("grpo.max_groups=1", "grpo.max_groups: 1 must be at least grpo.groups"),
        ("environment.kind=chess", "must be one of"),
        ("grpo.lerning_rate=1", "did you mean learning_rate"),
    ],
)
def test_bad_settings_are_refused_by_name(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("copy-digits", [assignment])
