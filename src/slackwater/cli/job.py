"""`slackwater job`: submit, list, show, follow, stop and resume jobs of a running service."""

import json
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from slackwater.cli.running_service import OVER, AsJson, State, ask_service
from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.config import decode, plain
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.job_file import JobFile
from slackwater.model.toml_text import read_toml

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Jobs of a running service.",
)

Name = Annotated[str, typer.Argument(help="The job's name.")]
Wait = Annotated[
    bool, typer.Option("--wait", help="Wait until the job has ended; exit 1 if it failed.")
]

_JOBS = "/slackwater/jobs"
_STOP_S = 30.0
_POLL_S = 0.3


@app.command()
def submit(
    file: Annotated[
        Path, typer.Argument(help="Job file (TOML): name, model, a recipe or a command, an SLO.")
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an ended job of the same name.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the file, print it resolved, and stop.")
    ] = False,
    wait: Wait = False,
    state: State = DEFAULT_STATE,
    as_json: AsJson = False,
) -> int:
    """Submit a job; the service runs its driver and keeps its output."""
    table = read_job_file(file)
    if dry_run:
        print(json.dumps(table, indent=2))
        return 0
    path = f"{_JOBS}?replace={str(replace).lower()}"
    found = ask_service(state, "POST", path, table)
    if wait:
        if not as_json:
            _print_stage(found)
        found = _wait_until_over(state, found["name"])
    return _print_stage(found, as_json)


@app.command("list")
def list_jobs(state: State = DEFAULT_STATE, as_json: AsJson = False) -> None:
    """List jobs with stage, device seconds, tokens and waits."""
    found = ask_service(state, "GET", _JOBS)
    if as_json:
        print(json.dumps(found))
        return
    from rich.console import Console

    from slackwater.cli.job_tables import job_list

    Console().print(job_list(found["jobs"]))


@app.command()
def show(name: Name, state: State = DEFAULT_STATE, as_json: AsJson = False) -> None:
    """Show a job in detail."""
    found = _ask(state, "GET", name)
    if as_json:
        print(json.dumps(found))
        return
    from rich.console import Console

    from slackwater.cli.job_tables import job_facts

    Console().print(job_facts(found))


@app.command()
def logs(
    name: Name,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the job ends.")
    ] = False,
    last: Annotated[
        int, typer.Option("--bytes", help="Start with this many bytes of its end.")
    ] = 8192,
    state: State = DEFAULT_STATE,
) -> None:
    """Print the output of the job's drivers, including restarts."""
    place = -max(last, 1)
    while True:
        found = _ask(state, "GET", name, f"/logs?place={place}&most=65536")
        print(found["text"], end="", flush=True)
        place = found["place"]
        if found["text"]:
            continue
        if not follow or found["over"]:
            return
        time.sleep(_POLL_S)


@app.command()
def stop(name: Name, state: State = DEFAULT_STATE, as_json: AsJson = False) -> None:
    """Stop a job's driver (SIGTERM, then SIGKILL); see `resume`."""
    found = _ask(state, "POST", name, "/stop")
    deadline_s = time.monotonic() + _STOP_S
    while found["stage"] not in OVER:
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"{name} is still stopping; see `slackwater job show {name}`")
        time.sleep(_POLL_S)
        found = _ask(state, "GET", name)
    _print_stage(found, as_json)


@app.command()
def resume(
    name: Name, wait: Wait = False, state: State = DEFAULT_STATE, as_json: AsJson = False
) -> int:
    """Resume an ended job from its last complete iteration."""
    found = _ask(state, "POST", name, "/resume")
    if wait:
        found = _wait_until_over(state, name)
    return _print_stage(found, as_json)


def _wait_until_over(state: Path, name: str) -> dict[str, Any]:
    while (found := _ask(state, "GET", name))["stage"] not in OVER:
        time.sleep(_POLL_S)
    return found


def _print_stage(found: dict[str, Any], as_json: bool = False) -> int:
    """Print a job's stage and the reason for it; the exit status."""
    reason = f" ({found['reason']})" if found["reason"] else ""
    print(json.dumps(found) if as_json else f"{found['name']}: {found['stage']}{reason}")
    return 1 if found["stage"] in ("failed", "refused") else 0


def _ask(state: Path, method: str, job: str, action: str = "") -> dict[str, Any]:
    return ask_service(state, method, f"{_JOBS}/{quote(job, safe='')}{action}")


def read_job_file(path: Path) -> dict[str, Any]:
    """Read a job file: absolute paths, a checked recipe, the number of iterations."""
    table = read_toml("FILE", path)
    try:
        return _resolve(table, path.resolve().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _resolve(table: dict[str, Any], folder: Path) -> dict[str, Any]:
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
