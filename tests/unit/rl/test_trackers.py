"""The same curves in every tracker; a tracker that fails does not end a run."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from slackwater.model.errors import ConfigError, RefusedError
from slackwater.rl import trackers
from slackwater.rl.recipe import load_recipe
from slackwater.rl.run_directory import PromptUse, RunCheckpoint, RunDirectory
from slackwater.rl.trackers import Trackers, check_trackers

RECIPE = load_recipe("copy-digits")


def tensorboard_curve(run: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {point.step: point.value for point in events.Scalars(name)}


def test_curves_are_equal_in_tensorboard_and_mlflow_also_after_a_resume(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    run = tmp_path / "run"
    for steps in (range(4), range(2, 6)):  # the second repeats what its checkpoint has not
        files = RunDirectory(run, RECIPE, ("tensorboard", "mlflow"))
        for step in steps:
            metrics = {"reward": step / 7, "optim/loss": -step / 3}
            files.record(step, metrics, [(PromptUse(0, step), True)])
            if step == 1:
                files.keep(RunCheckpoint(2, 2, "tinker://m/weights/a"))
        files.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run}/mlflow.db")
    known = json.loads((run / "trackers.json").read_text())["mlflow"]
    for name in ("reward", "optim/loss"):
        points = client.get_metric_history(known, name)
        assert {point.step: point.value for point in points} == pytest.approx(
            tensorboard_curve(run, name), rel=1e-6
        )
        assert set(tensorboard_curve(run, name)) == set(range(6))
    assert client.get_run(known).data.params["grpo.group_size"] == "8"


class Failing:
    """A tracker whose server goes away after its first step."""

    def __init__(self, folder: Path, settings: object, steps_done: int) -> None:
        self.steps: list[int] = []

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        if step:
            raise ConnectionError("no route to the tracker\nand more")

    def close(self) -> None:
        raise AssertionError("is left out by now")


def test_a_tracker_that_fails_is_left_out_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(trackers._TRACKERS, "mlflow", Failing)
    both = Trackers(("mlflow", "tensorboard"), tmp_path, {}, 0)
    for step in range(3):
        both.record(step, {"reward": float(step)})
    both.close()
    assert capsys.readouterr().err == (
        "WARNING: mlflow is no longer written: no route to the tracker\n"
    )
    assert tensorboard_curve(tmp_path, "reward") == {0: 0.0, 1: 1.0, 2: 2.0}


def test_unknown_and_missing_trackers_are_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check_trackers("tensorboard, tensorboard") == ("tensorboard",)
    assert check_trackers("") == ()
    with pytest.raises(ConfigError, match="--track: 'csv' must be of tensorboard, mlflow, wandb"):
        check_trackers("tensorboard,csv")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RefusedError, match="--track: wandb is not installed; pip install"):
        check_trackers("wandb")
