"""The options of `slackwater up`: flag, help and configuration key of each in one place."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from slackwater.cli.running_service import DryRun, Sets
from slackwater.model.config import plain
from slackwater.model.instance import EngineName

DEFAULT_STATE = Path("~/.local/share/slackwater")


class Setting(OptionInfo):
    """An option that sets the key of `ServiceSettings` with its own name, or another `key`."""

    def __init__(self, help: str, *names: str, key: str = "", **options: Any) -> None:
        super().__init__(default=..., param_decls=names, help=help, **options)
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Command-line options of `up`; those that are no `Setting` set none or several keys."""

    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]MODEL",
            help="Model: a directory, a .gguf file or ORG/NAME on the hub; repeatable.",
        ),
    ] = None
    engines: Annotated[
        int | None, Setting("Engines per model. Default: on all devices without a trainer.")
    ] = None
    serve: Annotated[
        str | None, typer.Option(metavar="[NAME=]MODEL", help="Model to serve with an SLO (--slo).")
    ] = None
    slo: Annotated[
        str, typer.Option(help="SLO of --serve: seconds to the first token and per token, at p99.")
    ] = "ttft=0.5,tpot=0.15"
    lend: Annotated[
        bool, typer.Option("--lend", help="Lend the served model's idle devices to rollouts.")
    ] = False
    instances: Annotated[
        Path | None,
        typer.Option(help="TOML file with a list of more instances, such as vLLM servers."),
    ] = None
    fleet: Annotated[
        Path | None,
        typer.Option(
            help="Fleet file: TOML with pools and nodes; replaces --engines and --trainers."
        ),
    ] = None
    local_engines: Annotated[
        int, Setting("Engines per model on the trainers' devices, active while these are idle.")
    ] = 0
    local_engine: Annotated[
        EngineName, Setting("Kind of --local-engines; a server sleeps while the trainers work.")
    ] = "embedded"
    trainers: Annotated[int, Setting("Number of trainer processes.")] = 1
    sandboxes: Annotated[
        int, Setting("Number of sandbox processes for actions; they share the cores.")
    ] = 0
    sandbox_backend: Annotated[
        str, Setting("auto (bubblewrap if it works here), process, bubblewrap, docker or gvisor.")
    ] = "auto"
    sandbox_folder: Annotated[
        Path | None,
        Setting("Folder for environments; as root, other users must be able to enter it."),
    ] = None
    sandbox_image: Annotated[
        str | None, Setting("Image of docker containers. Default: python:3.11-slim.")
    ] = None
    sandbox_allow: Annotated[
        list[str] | None,
        Setting("Address that actions may reach; repeatable.", metavar="HOST:PORT"),
    ] = None
    trust_tenants: Annotated[
        bool,
        Setting("Allow actions of several tenants without isolation.", "--trust-tenants"),
    ] = False
    max_waiting_actions: Annotated[
        int, Setting("Maximum number of waiting actions; more are refused (429).")
    ] = 20_000
    state: Annotated[Path, typer.Option(help="Folder for the service's state.")] = DEFAULT_STATE
    host: Annotated[str, Setting("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Setting("Port to listen on.")] = 8123
    front_ends: Annotated[int, Setting("Number of HTTP processes.")] = 1
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST", help="Another host name of the service; * is any; repeatable."
        ),
    ] = None
    tenant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Tenant, with a key of its own; repeatable."),
    ] = None
    database: Annotated[
        str | None,
        Setting(
            "Database URL, such as postgresql://... Default: SQLite in --state.", key="database_url"
        ),
    ] = None
    device: Annotated[str, Setting("cpu or cuda.")] = "cpu"
    devices: Annotated[int, Setting("On a CPU: split the cores into this many devices.")] = 1
    gpu_ids: Annotated[
        str | None, typer.Option(help="GPUs to use, such as 0,1,2. Default: all.")
    ] = None
    engine_layout: Annotated[
        str, Setting("Devices of each engine, such as tp=2. Default: one.")
    ] = ""
    trainer_layout: Annotated[
        str, Setting("Devices of each trainer, such as tp=2,dp=2. Default: one.")
    ] = ""
    train_dtype: Annotated[
        str | None,
        Setting("float32 or bfloat16, with fp32 master weights. Default: bfloat16 on cuda."),
    ] = None
    threads: Annotated[int, Setting("Compute threads per worker.")] = 1
    kv_mb: Annotated[int, Setting("KV cache of each engine, in MiB.")] = 1024
    max_running: Annotated[int, Setting("Maximum number of concurrent turns per engine.")] = 64
    session_timeout: Annotated[
        float,
        Setting(
            "Seconds of silence after which a client's session ends.", key="session_silent_after_s"
        ),
    ] = 300.0
    record: Annotated[Path | None, Setting("File to record the controllers' events in.")] = None
    background: Annotated[
        bool,
        typer.Option(
            "--background", help="Return once the workers are up; `slackwater down` stops them."
        ),
    ] = False
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration file (TOML); the command line takes precedence."),
    ] = None
    changes: Sets = None
    dry_run: DryRun = False


def command_line_settings(ctx: typer.Context) -> dict[str, Any]:
    """The settings given on the command line, by key."""
    return {
        key: plain(ctx.params[name])
        for name, key in option_settings().items()
        if is_given(ctx, name)
    }


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
    return str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")


def option_settings() -> dict[str, str]:
    """The key that each option of a setting sets, by the option's name."""
    hints = get_type_hints(UpOptions, include_extras=True)
    options = {name: hint.__metadata__[0] for name, hint in hints.items()}
    return {name: each.key or name for name, each in options.items() if isinstance(each, Setting)}


def with_up_options(command: Callable[[typer.Context, UpOptions], int]) -> Callable[..., int]:
    """A command for typer with one parameter per option."""

    def run(ctx: typer.Context, **given: Any) -> int:
        return command(ctx, UpOptions(**given))

    hints = {"ctx": typer.Context, **get_type_hints(UpOptions, include_extras=True)}
    defaults = {field.name: field.default for field in fields(UpOptions)}
    keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(name, keyword, default=defaults.get(name, empty), annotation=hint)
        for name, hint in hints.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    run.__annotations__ = hints
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run
