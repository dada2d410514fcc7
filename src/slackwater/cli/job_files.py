"""Job files: TOML that says what `slackwater job submit` is to run."""

import tomllib
from pathlib import Path
from typing import Any

from slackwater.model.config import decode, plain
from slackwater.model.errors import ConfigError
from slackwater.model.job_file import JobFile


def read_job_file(path: Path) -> dict[str, Any]:
    """The file as the service takes it: absolute paths, checked recipe, number of steps."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError.of("FILE", str(path), f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError.of("FILE", str(path), f"is not TOML: {error}") from None
    try:
        return _resolved(table, path.resolve().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _resolved(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    recipe, workdir = table.get("recipe"), table.get("workdir")
    if isinstance(recipe, str):
        if recipe.endswith(".toml"):
            table["recipe"] = str((folder / recipe).resolve())
        if "iterations" not in table:
            table["iterations"] = _steps(table["recipe"])
    if isinstance(workdir, str):
        table["workdir"] = str((folder / Path(workdir).expanduser()).resolve())
    elif workdir is None and "command" in table:
        table["workdir"] = str(folder)
    file = decode(JobFile, table)
    if file.recipe is not None:
        from slackwater.rl.recipe import load_recipe

        try:
            load_recipe(file.recipe, file.assignments())
        except ConfigError as error:
            raise ConfigError(f"options: {error}") from None
    found: dict[str, Any] = plain(file)
    return found


def _steps(recipe: str) -> int:
    from slackwater.rl.recipe import load_recipe

    return load_recipe(recipe).grpo.steps
