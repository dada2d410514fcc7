"""A run's files: `recipe.json`, `metrics.jsonl`, `prompts.jsonl`, `checkpoint.json`, trackers.

The JSON lines are written after each step. A checkpoint names its last step and how many prompts
were used; resuming truncates later lines, since those steps are repeated: every step and use of a
prompt is recorded once.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slackwater.model.config import decode, plain
from slackwater.model.errors import ConfigError
from slackwater.rl.recipe import Recipe
from slackwater.rl.trackers import Trackers


@dataclass(frozen=True, slots=True)
class PromptUse:
    epoch: int
    prompt: int


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """A fresh permutation of `prompts` prompts for every epoch."""

    prompts: int
    seed: int

    def uses(self, start: int, count: int) -> tuple[PromptUse, ...]:
        """The uses number `start` to `start + count - 1`."""
        uses: list[PromptUse] = []
        while len(uses) < count:
            epoch, offset = divmod(start + len(uses), self.prompts)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.prompts)
            prompts = order[offset : offset + count - len(uses)]
            uses.extend(PromptUse(epoch, int(prompt)) for prompt in prompts)
        return tuple(uses)


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """Steps done, prompts used by them, and where the service keeps the model's state."""

    steps_done: int
    prompts_used: int
    state_path: str


class RunDirectory:
    """One run's folder; an existing one is continued."""

    def __init__(
        self, path: Path, recipe: Recipe, trackers: Sequence[str] = ("tensorboard",)
    ) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._check_recipe(recipe)
        file = path / "checkpoint.json"
        self.checkpoint = RunCheckpoint(**json.loads(file.read_text())) if file.is_file() else None
        steps_done = self.checkpoint.steps_done if self.checkpoint else 0
        for name in ("metrics.jsonl", "prompts.jsonl"):
            self._truncate(path / name, steps_done)
        self._trackers = Trackers(trackers, path, plain(recipe), steps_done)

    def record(
        self, step: int, metrics: Mapping[str, float], uses: Sequence[tuple[PromptUse, bool]]
    ) -> None:
        """Record a step's curves, its prompts, and whether each was trained on."""
        rows = [[use.epoch, use.prompt, int(was_kept)] for use, was_kept in uses]
        self._append("prompts.jsonl", {"step": step, "uses": rows})
        self._append("metrics.jsonl", {"step": step, **metrics})
        self._trackers.record(step, metrics)

    def metrics(self) -> list[dict[str, float]]:
        """Every step's curves so far."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def keep(self, checkpoint: RunCheckpoint) -> None:
        """Make this the checkpoint that a resumed run starts from."""
        self._replace("checkpoint.json", json.dumps(asdict(checkpoint)))
        self.checkpoint = checkpoint

    def close(self) -> None:
        self._trackers.close()

    def _check_recipe(self, recipe: Recipe) -> None:
        """Refuse to continue a run with another recipe; only the number of steps may change."""
        path, current = self.path / "recipe.json", plain(recipe)
        if path.is_file() and (self.path / "checkpoint.json").is_file():
            # Decoding gives settings that are newer than the run their defaults.
            stored = plain(decode(Recipe, json.loads(path.read_text())))
            for table in (stored, current):
                for name in ("steps", "stop_at_reward"):
                    table["grpo"].pop(name, None)
                    table["supervised"].pop(name, None)
            if stored != current:
                changed = sorted(key for key in current if stored.get(key) != current[key])
                raise ConfigError.of(
                    "--run",
                    str(self.path),
                    f"contains a run with another {changed[0]}; give a new folder",
                )
        self._replace("recipe.json", json.dumps(plain(recipe), indent=2))

    def _truncate(self, path: Path, steps_done: int) -> None:
        if not path.is_file():
            return
        lines = []
        for line in path.read_text().splitlines():
            try:
                row: dict[str, Any] = json.loads(line)
            except json.JSONDecodeError:
                break  # the last line of a run that was killed during the write
            if row["step"] < steps_done:
                lines.append(line)
        self._replace(path.name, "".join(f"{line}\n" for line in lines))

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()

    def _replace(self, name: str, content: str) -> None:
        partial = self.path / f".{name}.partial"
        with partial.open("w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path / name)
