"""`slackwater train`: runs a recipe on a service, or on one that it starts for the run."""

import contextlib
import json
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slackwater.cli.preflight import check_folder
from slackwater.cli.running_service import DryRun, Key, Sets, Url
from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import DISK_FAULTS, ConfigError, SlackwaterError, UnavailableError

if TYPE_CHECKING:
    from slackwater.rl.actions import ActionThread
    from slackwater.rl.recipe import Recipe

app = typer.Typer(add_completion=False)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, a .toml file, or `list`.")],
    assignments: Sets = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the base model; sets model.base.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help=".jsonl or .parquet file, or a name for `datasets`; sets environment.data."
        ),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(help="exact, regex:PATTERN or MODULE:FUNCTION; sets environment.verifier."),
    ] = None,
    kl: Annotated[
        float | None,
        typer.Option(help="Penalty on the KL divergence from the base model; sets grpo.kl."),
    ] = None,
    track: Annotated[
        str, typer.Option(help="Trackers, separated by commas: tensorboard, mlflow, wandb.")
    ] = "tensorboard",
    run: Annotated[
        Path | None, typer.Option("--run", help="Folder of the run. Default: runs/RECIPE.")
    ] = None,
    dry_run: DryRun = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete the run's folder and start over.")
    ] = False,
    url: Url = None,
    key: Key = None,
    up: Annotated[
        bool, typer.Option("--up", help="Start a service for this run and stop it afterwards.")
    ] = False,
    models: Annotated[
        Path | None, typer.Option("--models", help="With --up: folder of models.")
    ] = None,
    state: Annotated[
        Path, typer.Option(help="Folder of the running service, if --url is not given.")
    ] = DEFAULT_STATE,
) -> None:
    """Run a recipe (GRPO, SFT or DPO); the same command again resumes it."""
    from slackwater.cli.atomic_file import unwind_on_terminate
    from slackwater.model.config import plain
    from slackwater.rl.recipe import load_recipe, recipe_description, recipe_names
    from slackwater.rl.trackers import check_trackers

    if recipe == "list":
        width = max(map(len, recipe_names()))
        for name in recipe_names():
            print(f"{name:{width}}  {recipe_description(name)}")
        return
    named = {
        "model.base": model,
        "environment.data": data,
        "environment.verifier": verifier,
        "grpo.kl": kl,
    }
    given_first = [f"{key}={json.dumps(v)}" for key, v in named.items() if v is not None]
    settings = load_recipe(recipe, [*given_first, *(assignments or [])])
    trackers = check_trackers(track)
    if dry_run:
        print(json.dumps(plain(settings), indent=2))
        return
    folder = run or Path("runs") / Path(recipe).stem
    check_folder("--run", folder)
    if fresh:
        import shutil

        if (folder / "recipe.json").is_file():
            shutil.rmtree(folder)
    unwind_on_terminate()
    given: dict[str, Any] = {"--model": model, "--data": data, "--verifier": verifier, "--kl": kl}
    given |= {"--track": track if track != "tensorboard" else None, "--set": assignments}
    given |= {"--run": folder, "--url": url, "--up": up, "--models": models}
    given["--state"] = state if state != DEFAULT_STATE else None
    again = train_command(recipe, given)
    with (
        print_resume_command_on_failure(folder, again),
        _service(up, url, key, settings, models, folder, state) as (address, secret),
    ):
        _train(settings, address, secret, folder, trackers)


@contextlib.contextmanager
def _service(
    up: bool,
    url: str | None,
    key: str | None,
    settings: "Recipe",
    models: Path | None,
    folder: Path,
    state: Path,
) -> Iterator[tuple[str, str]]:
    if not up:
        from slackwater.cli.running_service import check_service, find_service

        found = find_service(url, key, state)
        check_service(*found, settings.model.base)
        yield found
        return
    from slackwater.cli.model_names import find_model
    from slackwater.cli.own_service import own_service
    from slackwater.rl.environments import needs_sandboxes
    from slackwater.zoo.sources import is_model, models_directory
    from slackwater.zoo.tiny import SIZES, make_model

    base = settings.model.base
    directory = models_directory(models) / base
    if base not in SIZES:
        directory = find_model(base, "model.base", models)
    elif not is_model(directory):
        make_model(base, directory)
    options = ("--sandboxes", "1") if needs_sandboxes(settings.environment) else ()
    print(f"starting a service for this run in {folder / 'service'}", flush=True)
    with own_service(folder / "service", base, directory, *options) as found:
        yield found


def _train(settings: "Recipe", url: str, key: str, folder: Path, trackers: Sequence[str]) -> None:
    from slackwater.rl.sdk_client import closing, load_sdk

    load_sdk()
    import tinker
    from rich.console import Console

    from slackwater.cli.running_service import service_problems
    from slackwater.cli.train_display import display, plot
    from slackwater.rl.grpo import run
    from slackwater.rl.run_directory import RunDirectory
    from slackwater.rl.supervised import run_supervised

    console = Console()
    files = RunDirectory(folder, settings, trackers)
    begun = files.checkpoint.steps_done if files.checkpoint else 0
    if begun:
        console.print(f"{folder}: resuming from step {begun}", soft_wrap=True)
    with (
        contextlib.closing(files),
        _actions(settings, url, key) as actions,
        closing(tinker.ServiceClient(base_url=url, api_key=key)) as service,
        display(
            console, settings.steps, begun, partial(service_problems, url, key), settings.curve
        ) as shown,
    ):
        try:
            if settings.method == "grpo":
                weights = run(settings, service, files, shown, actions, shown.stage)
            else:
                weights = run_supervised(settings, service, files, shown, shown.stage)
        except tinker.TinkerError as error:
            raise UnavailableError(f"the service at {url} failed: {error}") from None
    curve = [row[settings.curve] for row in files.metrics()]
    console.print(plot(curve, settings.curve), highlight=False, markup=False)
    # Plain prints: lines to copy into a shell must not be wrapped.
    print(f"{settings.curve:<11} {reward_summary(curve)}")
    print(f"weights     {weights}")
    print(f"export      slackwater model export {weights} DIR --merge")
    print(f"curves      {folder / 'metrics.jsonl'}")
    if "tensorboard" in trackers:
        print(f"tensorboard --logdir {folder / 'tensorboard'}")


def _actions(
    settings: "Recipe", url: str, key: str
) -> contextlib.AbstractContextManager["ActionThread | None"]:
    from slackwater.rl.actions import ActionThread
    from slackwater.rl.environments import needs_sandboxes

    if needs_sandboxes(settings.environment):
        return ActionThread(url, key, job=settings.environment.kind)
    return contextlib.nullcontext()


def reward_summary(rewards: list[float]) -> str:
    """The means of the first and of the last steps, which do not overlap."""
    if not rewards:
        return "no steps"
    count = min(5, len(rewards) // 2)
    if not count:
        return f"{rewards[0]:.3f} in one step"
    first, last = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
    steps = "step" if count == 1 else f"{count} steps"
    return f"{first:.3f} in the first {steps}, {last:.3f} in the last {steps}"


def train_command(recipe: str, options: Mapping[str, Any]) -> str:
    """The command line with the options that are set; a list repeats its option."""
    words = ["slackwater", "train", recipe]
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif isinstance(value, list):
            words += [word for item in value for word in (name, str(item))]
        elif value is not None and value is not False:
            words += [name, str(value)]
    return shlex.join(words)


@contextlib.contextmanager
def print_resume_command_on_failure(folder: Path, again: str) -> Iterator[None]:
    """Print the resume command when a run ends early; a full disk is one clear error."""
    threading.excepthook = _hook(threading.excepthook)
    try:
        yield
    except (KeyboardInterrupt, SystemExit, SlackwaterError) as ended:
        if not isinstance(ended, ConfigError):
            _print_resume_command(folder, again)
        raise
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        _print_resume_command(folder, again)
        where = error.filename or folder
        fix = "make room and run the command again"
        raise UnavailableError(f"{where} cannot be written: {error.strerror}; {fix}") from None


def _print_resume_command(folder: Path, again: str) -> None:
    if (folder / "recipe.json").is_file():
        begun = (folder / "checkpoint.json").is_file()
        how = "resume from the last checkpoint" if begun else "no checkpoint yet; start again"
        print(f"{how} with: {again}", file=sys.stderr, flush=True)


def _hook(usual: Any) -> Any:
    """Ignore disk faults in the metrics thread: the run itself reports them."""

    def hook(caught: threading.ExceptHookArgs) -> None:
        error = caught.exc_value
        if not (isinstance(error, OSError) and error.errno in DISK_FAULTS):
            usual(caught)

    return hook
