"""Finds a model by name: a directory, a GGUF file, an entry of the models' folder, ORG/NAME."""

import hashlib
import subprocess
import sys
from pathlib import Path

from slackwater.model.errors import ConfigError, RefusedError
from slackwater.zoo.sources import hub_snapshot, is_hub_name, is_model, models_directory


def find_model(given: str, option: str = "--model", models: Path | None = None) -> Path:
    """The directory of a model, downloaded from the hub or made from a GGUF file if need be."""
    path = Path(given).expanduser()
    if given and path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return _convert(path.resolve(), models)
    folder = models_directory(models)
    if given and is_model(folder / given):
        return folder / given
    if not is_hub_name(given):
        fix = f"must be a directory, a .gguf file, a model in {folder}, or ORG/NAME on the hub"
        raise ConfigError.of(option, given, fix)
    try:
        return hub_snapshot(given)
    except ConfigError as error:
        raise ConfigError(f"{option}: {str(error).removeprefix('model: ')}") from None


def gguf_directory(file: Path, models: Path | None = None) -> Path:
    """The folder for a GGUF file's model; a changed file gets another one."""
    seen = file.stat()
    digest = hashlib.sha256(f"{file}\0{seen.st_size}\0{seen.st_mtime_ns}".encode()).hexdigest()
    return models_directory(models) / f"{file.stem}-{digest[:8]}"


def _convert(file: Path, models: Path | None) -> Path:
    directory = gguf_directory(file, models)
    if not is_model(directory):
        run_model_command("get", str(file), "--models", str(directory.parent))
    return directory


def run_model_command(*arguments: str) -> None:
    """Run `slackwater model` in a child process, because it loads PyTorch."""
    command = [sys.executable, "-m", "slackwater", "model", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RefusedError(reason.removeprefix("slackwater: "))
