"""Unmodified `tinker-cookbook` recipes as child processes, without a network.

A workspace folder is the recipes' working directory: it holds `ORG/MODEL` with a tokenizer, so that
the cookbook's own table of models and its tokenizer loader are both content, and `openai/gsm8k` as
a data set made on the spot.
"""

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from harness.preloaded_programs import PreloadedPrograms

# What all recipes import: most of the processor time of a short run.
_IMPORTED = (
    "tinker_cookbook.rl.train",
    "tinker_cookbook.recipes.math_rl.math_env",
    "transformers.models.auto.tokenization_auto",
)
MODEL_NAME = "Qwen/Qwen3-8B-Base"


class Workspace:
    """Where recipes run, and the service they talk to."""

    def __init__(self, folder: Path, base_url: str, api_key: str) -> None:
        self.folder = folder
        self._base_url, self._api_key = base_url, api_key
        self._programs: PreloadedPrograms | None = None  # with the first recipe
        self._launching = threading.Lock()

    @classmethod
    def make(cls, folder: Path, model_directory: Path, base_url: str, api_key: str) -> "Workspace":
        named = folder / MODEL_NAME
        named.parent.mkdir(parents=True)
        named.symlink_to(model_directory, target_is_directory=True)
        _write_gsm8k(folder / "openai" / "gsm8k", problems=64)
        return cls(folder, base_url, api_key)

    def environment(self) -> Mapping[str, str]:
        return {
            **os.environ,
            "TINKER_BASE_URL": self._base_url,
            "TINKER_API_KEY": self._api_key,
            "TINKER_COOKBOOK_RUNS_DIR": str(self.folder / "runs"),
            "HF_HOME": str(self.folder / "hf"),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
        }

    @property
    def programs(self) -> PreloadedPrograms:
        with self._launching:
            if self._programs is None:
                self._programs = PreloadedPrograms.launch(_IMPORTED, self.environment())
            return self._programs

    def close(self) -> None:
        """After the last recipe."""
        if self._programs is not None:
            self._programs.close()

    @contextmanager
    def running(
        self, recipe: str, log: str, **settings: object
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A recipe with `key=value` settings, ended with the block; its output goes to
        `<log>.out`.
        """
        arguments = [f"{key}={value}" for key, value in settings.items()]
        arguments.append(f"log_path={self.folder / log}")
        with (self.folder / f"{log}.out").open("ab") as output:
            process = self.programs.start(
                f"tinker_cookbook.recipes.{recipe}",
                arguments,
                output,
                environment=self.environment(),
                folder=self.folder,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def run(
        self, recipe: str, log: str, *, within_s: float, **settings: object
    ) -> list[dict[str, float]]:
        """Run a recipe to its end; its metrics, a row a step."""
        with self.running(recipe, log, **settings) as process:
            status = process.wait(within_s)
        assert status == 0, f"{recipe} ended with {status}:\n{self.tail(log)}"
        return self.metrics(log)

    def metrics(self, log: str) -> list[dict[str, float]]:
        lines = (self.folder / log / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def tail(self, log: str, lines: int = 40) -> str:
        return "\n".join(
            (self.folder / f"{log}.out").read_text(errors="replace").splitlines()[-lines:]
        )


def _write_gsm8k(folder: Path, problems: int) -> None:
    folder.mkdir(parents=True)
    folder.joinpath("README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: train.jsonl\n  - split: test\n    path: test.jsonl\n---\n"
    )
    rows = [
        {
            "question": f"Ann has {n} pens and buys {n % 7 + 1} more. How many?",
            "answer": f"#### {n + n % 7 + 1}",
        }
        for n in range(problems)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for split in ("train", "test"):
        folder.joinpath(f"{split}.jsonl").write_text(text)
