"""Experiment trackers: the same curves in TensorBoard, MLflow and Weights & Biases."""

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from slackwater.model.config import flatten
from slackwater.model.errors import ConfigError, RefusedError

PROJECT = "slackwater"


class Tracker(Protocol):
    """A destination of a run's curves besides its folder."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_trackers(names_list: str) -> tuple[str, ...]:
    """The names in `tensorboard,mlflow,wandb`; refused if one is unknown or not installed."""
    names = tuple(name.strip() for name in names_list.split(",") if name.strip())
    for name in names:
        if name not in _TRACKERS:
            fix = f"must be of {', '.join(_TRACKERS)}, separated by commas"
            raise ConfigError.of("--track", name, fix)
        try:
            __import__(name)
        except ModuleNotFoundError:
            fix = "pip install -c constraints.txt '.[trackers]'"
            raise RefusedError(f"--track: {name} is not installed; {fix}") from None
    return tuple(dict.fromkeys(names))


class Trackers:
    """All trackers of one run; one that fails is dropped with a warning, and the run continues."""

    def __init__(
        self, names: Sequence[str], folder: Path, settings: Mapping[str, Any], steps_done: int
    ) -> None:
        self._active: dict[str, Tracker] = {}
        for name in names:
            try:
                self._active[name] = _TRACKERS[name](folder, settings, steps_done)
            except Exception as error:  # noqa: BLE001  (trackers raise anything; training goes on)
                self._warn(name, error)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in list(self._active.items()):
            try:
                tracker.record(step, metrics)
            except Exception as error:  # noqa: BLE001
                del self._active[name]
                self._warn(name, error)

    def close(self) -> None:
        for name, tracker in self._active.items():
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001
                self._warn(name, error)

    @staticmethod
    def _warn(name: str, error: Exception) -> None:
        reason = str(error).partition("\n")[0]
        sys.stderr.write(f"WARNING: {name} is no longer written: {reason}\n")


class TensorBoardTracker:
    """Event files in `tensorboard/`; a resumed run replaces the steps that it repeats."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], steps_done: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        resumed = steps_done or any(folder.glob("tensorboard/*"))
        self._writer = EventFileWriter(str(folder / "tensorboard"))
        if resumed:
            restart = self._event(wall_time=time.time(), step=steps_done)
            restart.session_log.status = event_pb2.SessionLog.START
            self._writer.add_event(restart)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        value = self._summary.Value
        values = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MlflowTracker:
    """One run of experiment `slackwater`, at MLFLOW_TRACKING_URI or in `mlflow.db` of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], steps_done: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve()}/mlflow.db"
        self._client = MlflowClient(tracking_uri=uri)
        run_id = _read_run_ids(folder).get("mlflow")
        if run_id is None:
            known = self._client.get_experiment_by_name(PROJECT)
            experiment = known.experiment_id if known else self._client.create_experiment(PROJECT)
            run = self._client.create_run(experiment, run_name=folder.resolve().name)
            run_id = str(run.info.run_id)
            params = [Param(name, str(value)) for name, value in flatten(settings).items()]
            self._client.log_batch(run_id, params=params)
            _write_run_id(folder, "mlflow", run_id)
        self._run = run_id

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        at_ms = int(time.time() * 1000)
        points = [self._metric(name, value, at_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=points)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WandbTracker:
    """One run of project `slackwater` (or WANDB_PROJECT); offline without an API key."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], steps_done: int) -> None:
        import wandb

        run_id = _read_run_ids(folder).get("wandb") or secrets.token_hex(4)
        mode: Any = os.environ.get("WANDB_MODE") or (
            "online" if os.environ.get("WANDB_API_KEY") else "offline"
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
            mode=mode,
            settings=wandb.Settings(silent=True),
        )
        _write_run_id(folder, "wandb", run_id)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Any] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}


def _read_run_ids(folder: Path) -> dict[str, str]:
    """The ids of this run by tracker, of those where it has begun."""
    path = folder / "trackers.json"
    run_ids: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    return run_ids


def _write_run_id(folder: Path, name: str, run: str) -> None:
    (folder / "trackers.json").write_text(json.dumps(_read_run_ids(folder) | {name: run}))
