"""`slackwater up`: starts the service, in the foreground or the background."""

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slackwater.cli.up_options import UpOptions, command_line_settings, is_given, with_up_options
from slackwater.model.config import decode, override, plain
from slackwater.model.errors import ConfigError
from slackwater.model.toml_text import read_toml, toml_text

if TYPE_CHECKING:
    from slackwater.runtime.store.state_directory import StateDirectory

app = typer.Typer(add_completion=False)

_NUMPY_THREADS = "OPENBLAS_NUM_THREADS"


def parse_models(given: list[str], option: str = "--model") -> dict[str, Path]:
    """Parse `[NAME=]MODEL` options; without a name the model's own is used."""
    from slackwater.cli.model_names import find_model

    models: dict[str, Path] = {}
    for item in given:
        name, equals, model = item.partition("=")
        path = find_model(model if equals else item, option)
        if not equals:
            name = str(path.resolve()) if Path(item).expanduser().exists() else item
        if not name or name in models:
            raise ConfigError.of(option, item, "must have a unique name: NAME=MODEL")
        models[name] = path
    return models


def settings_table(
    config: Path | None, flags: dict[str, Any], changes: list[str]
) -> dict[str, Any]:
    """The settings: the file, overridden by the given options, overridden by `--set`."""
    table = {} if config is None else read_toml("--config", config)
    return override(table | flags, changes)


@app.command()
@with_up_options
def up(ctx: typer.Context, options: UpOptions) -> int:
    """Start the service; prints its URL and a key, and runs until Ctrl-C or `slackwater down`."""
    gc.disable()  # until the service is built (`collect_when_idle`)
    _import_numpy()
    from slackwater.cli.atomic_file import unwind_on_terminate
    from slackwater.cli.background_start import removing_failed_start, start_in_background
    from slackwater.cli.device_preview import preview_devices
    from slackwater.cli.preflight import check_device, check_models, check_node_folders, check_room
    from slackwater.model.folder import write_whole
    from slackwater.runtime.launch.fleet_file import read_fleet_file
    from slackwater.runtime.launch.instance_list import read_instance_list
    from slackwater.runtime.settings import ServiceSettings

    table = settings_table(options.config, command_line_settings(ctx), options.changes or [])
    if options.model:
        table["models"] = plain(parse_models(options.model))
    table |= _list_settings(options)
    if options.instances is not None:
        table |= plain(read_instance_list(options.instances))
    if options.fleet is not None:
        table["fleet"] = plain(read_fleet_file(options.fleet))
    table |= _serving_tables(table, options)
    table |= _resolve_models(table.get("models"))
    os.umask(0o077)  # after the hub's cache: only this user may read keys, prompts and weights
    state = options.state if is_given(ctx, "state") else table.get("state", options.state)
    root = Path(state).expanduser().resolve()
    table["state"] = str(root)
    settings = decode(ServiceSettings, {"models": {}} | table)
    if options.dry_run:
        devices = preview_devices(settings)
        print(toml_text(plain(settings)), end="")
        print("".join(f"# {line}\n" for line in devices), end="")
        return 0
    if settings.fleet is None and not settings.gpu_ids:
        check_device(settings.device)
    if settings.has_engines:
        check_models(settings.models)
    check_room(root)
    check_node_folders(settings.whole_fleet)
    unwind_on_terminate()  # until the service handles signals
    if options.background:
        return start_in_background(root)
    from slackwater.cli.service_process import run_service  # imported late: takes 1 s

    devices = preview_devices(settings)
    if len(devices) > len(settings.whole_fleet.nodes):  # skip it if every node has one device
        print(*devices, sep="\n")
    with removing_failed_start(root) as folder:
        if not settings.models and not settings.only_actions:
            settings = replace(settings, models=_default_models(folder))
            check_models(settings.models)
        write_whole(folder.root / "config.toml", toml_text(plain(settings)))
        return run_service(settings, folder)


def _import_numpy() -> None:
    """Import NumPy without threads of its own: the service needs none, and forks its front ends
    only while it has one thread. Its children may have theirs.
    """
    given = os.environ.get(_NUMPY_THREADS)
    os.environ[_NUMPY_THREADS] = "1"
    import numpy  # noqa: F401

    if given is None:
        del os.environ[_NUMPY_THREADS]
    else:
        os.environ[_NUMPY_THREADS] = given


def _list_settings(options: UpOptions) -> dict[str, Any]:
    from slackwater.worker.node_devices import parse_gpu_ids

    gpu_ids = None if options.gpu_ids is None else list(parse_gpu_ids(options.gpu_ids))
    lists = {
        "tenants": list(dict.fromkeys(options.tenant or ())),
        "allowed_hosts": options.allowed_host,
        "gpu_ids": gpu_ids,
    }
    return {name: given for name, given in lists.items() if given}


def _resolve_models(models: Any) -> dict[str, Any]:
    """Find the models of a configuration file that are not absolute directories."""
    from slackwater.cli.model_names import find_model

    if not isinstance(models, dict) or not all(isinstance(model, str) for model in models.values()):
        return {}  # `decode` refuses it with the field's name
    found = {
        name: model if Path(model).is_absolute() else str(find_model(model, f"models.{name}"))
        for name, model in models.items()
    }
    return {"models": found}


def _serving_tables(table: dict[str, Any], options: UpOptions) -> dict[str, Any]:
    """The configuration tables of `--serve`, `--slo` and `--lend`."""
    from slackwater.model.serving import ServingSlo

    if options.serve is None:
        if options.lend:
            raise ConfigError("--lend: needs a served model; add --serve [NAME=]MODEL")
        return {}
    served = parse_models([options.serve], "--serve")
    slo = plain(ServingSlo.parse(options.slo))
    return {
        "models": {**table.get("models", {}), **plain(served)},
        "serving": {"model": next(iter(served)), "slo": slo, "lend": options.lend},
    }


def _default_models(folder: "StateDirectory") -> dict[str, Path]:
    """The models of a service without --model: a tiny one with random weights."""
    from slackwater.cli.model_names import run_model_command

    directory = folder.root / "models" / "tiny"
    if not (directory / "config.json").is_file():
        print("no --model given: making a tiny one with random weights", file=sys.stderr)
        run_model_command("make", "tiny", "--models", str(directory.parent))
    return {"tiny": directory}
