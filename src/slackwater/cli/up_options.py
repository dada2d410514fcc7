"""The options of `slackwater up`, each in one place: its flag, its help, and the setting it is."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from slackwater.model.config import plain
from slackwater.model.instance import EngineName

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
        typer.Option(
            help="[NAME=]MODEL: directory, .gguf file or ORG/NAME of the hub; repeatable."
        ),
    ] = None
    engines: Annotated[
        int | None,
        typer.Option(help="Engines per model. Default: on all devices that no trainer has."),
        Setting("engines"),
    ] = None
    serve: Annotated[
        str | None, typer.Option(help="[NAME=]MODEL to serve with an SLO (--slo).")
    ] = None
    slo: Annotated[str, typer.Option(help="The SLO, seconds at p99: ttft=0.5,tpot=0.15.")] = (
        "ttft=0.5,tpot=0.15"
    )
    lend: Annotated[
        bool, typer.Option("--lend", help="Lend the served model's devices for rollouts.")
    ] = False
    instances: Annotated[
        Path | None, typer.Option(help="TOML list of more instances, for example vLLM servers.")
    ] = None
    fleet: Annotated[
        Path | None,
        typer.Option(help="TOML of pools and nodes; replaces --engines and --trainers."),
    ] = None
    local_engines: Annotated[
        int,
        typer.Option(help="Engines per model that run while the trainers are idle."),
        Setting("local_engines"),
    ] = 0
    local_engine: Annotated[
        EngineName,
        typer.Option(help="What those are: a server sleeps while the trainers work."),
        Setting("local_engine"),
    ] = "embedded"
    trainers: Annotated[int, typer.Option(help="Trainer processes."), Setting("trainers")] = 1
    sandboxes: Annotated[
        int,
        typer.Option(help="Sandbox processes for actions; they share the cores."),
        Setting("sandboxes"),
    ] = 0
    sandbox_backend: Annotated[
        str,
        typer.Option(help="auto (bubblewrap where it runs), process, bubblewrap, docker, gvisor."),
        Setting("sandbox_backend"),
    ] = "auto"
    sandbox_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for environments; as root, other users must be able to enter it."
        ),
        Setting("sandbox_folder"),
    ] = None
    sandbox_image: Annotated[
        str | None,
        typer.Option(help="Image of docker's containers; default python:3.11-slim."),
        Setting("sandbox_image"),
    ] = None
    sandbox_allow: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT that actions with a network may reach; repeatable."),
        Setting("sandbox_allow"),
    ] = None
    trust_tenants: Annotated[
        bool,
        typer.Option("--trust-tenants", help="Allow several tenants' actions without isolation."),
        Setting("trust_tenants"),
    ] = False
    max_waiting_actions: Annotated[
        int,
        typer.Option(help="Limit of waiting actions; more are refused (429)."),
        Setting("max_waiting_actions"),
    ] = 20_000
    state: Annotated[Path, typer.Option(help="Folder for all of the service's state.")] = (
        DEFAULT_STATE
    )
    host: Annotated[str, typer.Option(help="Address to listen on."), Setting("host")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on."), Setting("port")] = 8123
    front_ends: Annotated[
        int, typer.Option(help="Processes that speak HTTP."), Setting("front_ends")
    ] = 1
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Another host name of the service; repeatable; * is any."),
    ] = None
    tenant: Annotated[
        list[str] | None, typer.Option(help="A tenant, who gets a key; repeatable.")
    ] = None
    database: Annotated[
        str | None,
        typer.Option(help="Database URL, such as postgresql://...; default SQLite."),
        Setting("database_url"),
    ] = None
    device: Annotated[str, typer.Option(help="cpu or cuda."), Setting("device")] = "cpu"
    devices: Annotated[
        int,
        typer.Option(help="On a CPU: so many equal slices of the cores, each a device."),
        Setting("devices"),
    ] = 1
    gpu_ids: Annotated[
        str | None, typer.Option(help="GPUs to use, such as 0,1,2. Default: all.")
    ] = None
    engine_layout: Annotated[
        str,
        typer.Option(help="Devices of each engine, such as tp=2. Default: one."),
        Setting("engine_layout"),
    ] = ""
    trainer_layout: Annotated[
        str,
        typer.Option(help="Devices of each trainer, such as tp=2,dp=2. Default: one."),
        Setting("trainer_layout"),
    ] = ""
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
        int, typer.Option(help="Concurrent turns per engine."), Setting("max_running")
    ] = 64
    session_timeout: Annotated[
        float,
        typer.Option(help="End a client's session after this many silent seconds."),
        Setting("session_silent_after_s"),
    ] = 300.0
    record: Annotated[
        Path | None,
        typer.Option(help="Record the controllers' events in this file."),
        Setting("record"),
    ] = None
    background: Annotated[
        bool,
        typer.Option(
            "--background", help="Return once the workers are up; `slackwater down` stops it."
        ),
    ] = False
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with these settings; the command line takes precedence."),
    ] = None
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="a.b=value: change one setting; repeatable.")
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
    ] = False


def given_settings(ctx: typer.Context) -> dict[str, Any]:
    """The settings given on the command line, by key."""
    return {
        setting.key: plain(ctx.params[name])
        for name, setting in option_settings().items()
        if is_given(ctx, name)
    }


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
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


def with_up_options(command: Callable[[typer.Context, UpOptions], int]) -> Callable[..., int]:
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
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    called.__annotations__ = hints
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    return called
