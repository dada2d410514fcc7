"""The options of `slackwater up`, each in one place: its flag, its help, and the setting it is."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from slackwater.model.config import plain

DEFAULT_STATE = Path("~/.local/share/slackwater")


@dataclass(frozen=True, slots=True)
class Setting:
    """The option sets this key of `ServiceSettings`, which a configuration file has too."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Command-line options of `up`; those without a `Setting` map to none or several settings."""

    model: Annotated[
        list[str] | None,
        typer.Option(help="NAME=DIRECTORY of a base model; repeat for more. Default: a tiny one."),
    ] = None
    engines: Annotated[
        int, typer.Option(help="Engine processes per model."), Setting("engines")
    ] = 1
    serve: Annotated[
        str | None, typer.Option(help="NAME=DIRECTORY of a model to serve with a promise (--slo).")
    ] = None
    slo: Annotated[str, typer.Option(help="The promise, seconds at p99: ttft=0.5,tpot=0.15.")] = (
        "ttft=0.5,tpot=0.15"
    )
    lend: Annotated[
        bool, typer.Option("--lend", help="The served model's devices roll out for the others.")
    ] = False
    instances: Annotated[
        Path | None, typer.Option(help="TOML list of further instances, also vLLM servers.")
    ] = None
    fleet: Annotated[
        Path | None,
        typer.Option(help="TOML of pools and nodes; --engines and --trainers do not count then."),
    ] = None
    local_engines: Annotated[
        int,
        typer.Option(help="Engines per model that work while the trainers have nothing to do."),
        Setting("local_engines"),
    ] = 0
    trainers: Annotated[int, typer.Option(help="Trainer processes."), Setting("trainers")] = 1
    sandboxes: Annotated[
        int,
        typer.Option(help="Sandbox processes that run actions; they share the cores."),
        Setting("sandboxes"),
    ] = 0
    sandbox_backend: Annotated[
        str,
        typer.Option(help="auto (bubblewrap where it runs), process, bubblewrap, docker, gvisor."),
        Setting("sandbox_backend"),
    ] = "auto"
    sandbox_folder: Annotated[
        Path | None,
        typer.Option(help="Folder for environments. Root's must be open to others."),
        Setting("sandbox_folder"),
    ] = None
    sandbox_image: Annotated[
        str | None,
        typer.Option(help="Image of docker's containers; default python:3.11-slim."),
        Setting("sandbox_image"),
    ] = None
    sandbox_allow: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT that actions with a network may reach; repeat for more."),
        Setting("sandbox_allow"),
    ] = None
    trust_tenants: Annotated[
        bool,
        typer.Option(
            "--trust-tenants", help="Run several tenants' actions without isolation, if need be."
        ),
        Setting("trust_tenants"),
    ] = False
    max_waiting_actions: Annotated[
        int,
        typer.Option(help="Actions that may wait; what comes beyond them is refused (429)."),
        Setting("max_waiting_actions"),
    ] = 20_000
    state: Annotated[Path, typer.Option(help="Folder for everything it keeps.")] = DEFAULT_STATE
    host: Annotated[str, typer.Option(help="Address to listen on."), Setting("host")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on."), Setting("port")] = 8123
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A further name by which clients call it; repeat for more; * is any."),
    ] = None
    tenant: Annotated[
        list[str] | None, typer.Option(help="Tenants, each with a key of its own.")
    ] = None
    database: Annotated[
        str | None,
        typer.Option(help="Database URL, such as postgresql://...; default SQLite."),
        Setting("database_url"),
    ] = None
    device: Annotated[str, typer.Option(help="cpu or cuda."), Setting("device")] = "cpu"
    train_dtype: Annotated[
        str | None,
        typer.Option(
            help="float32 or bfloat16, with fp32 master weights. Default: bfloat16 on cuda."
        ),
        Setting("train_dtype"),
    ] = None
    threads: Annotated[
        int, typer.Option(help="Compute threads per worker."), Setting("threads")
    ] = 1
    kv_mb: Annotated[
        int, typer.Option(help="KV cache of each engine, in MiB."), Setting("kv_mb")
    ] = 1024
    max_running: Annotated[
        int, typer.Option(help="Turns that an engine runs at once."), Setting("max_running")
    ] = 64
    session_timeout: Annotated[
        float,
        typer.Option(help="Seconds of silence after which a client's session ends."),
        Setting("session_silent_after_s"),
    ] = 300.0
    record: Annotated[
        Path | None,
        typer.Option(help="Record the controllers' events to this file."),
        Setting("record"),
    ] = None
    background: Annotated[
        bool,
        typer.Option(
            "--background", help="Return once its workers are up; `slackwater down` stops it."
        ),
    ] = False
    config: Annotated[
        Path | None, typer.Option(help="TOML of all that is said here; options on the line win.")
    ] = None
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="a.b=value: change one setting; repeat.")
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration, start nothing.")
    ] = False


def given_settings(ctx: typer.Context) -> dict[str, Any]:
    """The settings that stand on the command line, by their keys."""
    return {
        setting.key: plain(ctx.params[name])
        for name, setting in option_settings().items()
        if is_given(ctx, name)
    }


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line, rather than having its default."""
    return str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")


def option_settings() -> dict[str, Setting]:
    """Which setting an option is, by the option's name."""
    hints = get_type_hints(UpOptions, include_extras=True)
    return {
        name: mark
        for name, hint in hints.items()
        for mark in hint.__metadata__
        if isinstance(mark, Setting)
    }


def with_up_options(
    command: Callable[[typer.Context, UpOptions], int],
) -> Callable[..., int]:
    """The command as typer reads it: a parameter for every option."""

    def called(ctx: typer.Context, **given: Any) -> int:
        return command(ctx, UpOptions(**given))

    hints = {"ctx": typer.Context, **get_type_hints(UpOptions, include_extras=True)}
    defaults = {field.name: field.default for field in fields(UpOptions)}
    keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(name, keyword, default=defaults.get(name, empty), annotation=hint)
        for name, hint in hints.items()
    ]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = hints
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    return called
