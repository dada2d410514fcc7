"""`slackwater up`: start the service, in the foreground or behind."""

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slackwater.cli.up_options import UpOptions, given_settings, is_given, with_up_options
from slackwater.model.config import decode, override, plain
from slackwater.model.errors import ConfigError
from slackwater.model.toml_text import read_toml, toml_text

if TYPE_CHECKING:
    from slackwater.runtime.store.state_directory import StateDirectory

app = typer.Typer(add_completion=False)


def parse_models(given: list[str], option: str = "--model") -> dict[str, Path]:
    """`NAME=MODEL`, or a model that is its own name."""
    from slackwater.cli.model_names import find_model

    models: dict[str, Path] = {}
    for item in given:
        name, equals, model = item.partition("=")
        path = find_model(model if equals else item, option)
        if not equals:
            name = str(path.resolve()) if Path(item).expanduser().exists() else item
        if not name or name in models:
            raise ConfigError.of("--model", item, "needs a name of its own")
        models[name] = path
    return models


def settings_table(
    config: Path | None, flags: dict[str, Any], changes: list[str]
) -> dict[str, Any]:
    """What the service is to be: the file, then the options that were given, then `--set`."""
    table = {} if config is None else read_toml("--config", config)
    return override(table | flags, changes)


@app.command()
@with_up_options
def up(ctx: typer.Context, options: UpOptions) -> int:
    """Start the service: prints its URL and a key, runs until Ctrl-C or `slackwater down`."""
    from slackwater.cli.background_start import removing_failed_start, start_behind
    from slackwater.cli.device_preview import assigned_devices
    from slackwater.cli.preflight import check_device, check_models
    from slackwater.runtime.launch.fleet_file import read_fleet_file
    from slackwater.runtime.launch.instance_list import read_instance_list
    from slackwater.runtime.settings import ServiceSettings
    from slackwater.runtime.store.state_directory import write_whole

    table = settings_table(options.config, given_settings(ctx), options.changes or [])
    if options.model:
        table["models"] = plain(parse_models(options.model))
    table |= _given_lists(options)
    if options.instances is not None:
        table |= plain(read_instance_list(options.instances))
    if options.fleet is not None:
        table["fleet"] = plain(read_fleet_file(options.fleet))
    table |= _serving_tables(table, options)
    table |= _named_models(table.get("models"))
    os.umask(0o077)  # keys, prompts and weights are nobody else's to read; the hub's cache is
    state = options.state if is_given(ctx, "state") else table.get("state", options.state)
    root = Path(state).expanduser().resolve()
    table["state"] = str(root)
    settings = decode(ServiceSettings, {"models": {}} | table)
    if options.dry_run:
        devices = assigned_devices(settings)
        print(toml_text(plain(settings)), end="")
        print("".join(f"# {line}\n" for line in devices), end="")
        return 0
    if settings.fleet is None and not settings.gpu_ids:
        check_device(settings.device)
    if settings.has_engines:
        check_models(settings.models)
    if options.background:
        return start_behind(root)
    gc.disable()  # until the service has been built up (`collect_when_idle`)
    from slackwater.cli.service_process import run_service  # late: 1 s

    devices = assigned_devices(settings)
    if len(devices) > len(settings.whole_fleet.nodes):  # a node's only device needs no mention
        print(*devices, sep="\n")
    with removing_failed_start(root) as folder:
        if not settings.models and not settings.only_actions:
            settings = replace(settings, models=_default_models(folder))
            check_models(settings.models)
        write_whole(folder.root / "config.toml", toml_text(plain(settings)))
        return run_service(settings, folder)


def _given_lists(options: UpOptions) -> dict[str, Any]:
    """Settings that are lists, of those options that were given."""
    from slackwater.worker.node_devices import parse_gpu_ids

    gpu_ids = None if options.gpu_ids is None else list(parse_gpu_ids(options.gpu_ids))
    lists = {
        "tenants": list(dict.fromkeys(options.tenant or ())),
        "allowed_hosts": options.allowed_host,
        "gpu_ids": gpu_ids,
    }
    return {name: given for name, given in lists.items() if given}


def _named_models(models: Any) -> dict[str, Any]:
    """The models of a configuration file that are no directories, by where they are."""
    from slackwater.cli.model_names import find_model

    if not isinstance(models, dict) or not all(isinstance(model, str) for model in models.values()):
        return {}  # refused with the other settings
    found = {
        name: model if Path(model).is_absolute() else str(find_model(model, f"models.{name}"))
        for name, model in models.items()
    }
    return {"models": found}


def _serving_tables(table: dict[str, Any], options: UpOptions) -> dict[str, Any]:
    """What `--serve`, `--slo` and `--lend` say, as tables of a configuration file."""
    from slackwater.model.serving import ServingSlo

    if options.serve is None:
        if options.lend:
            raise ConfigError.of("--lend", True, "needs a served model: --serve [NAME=]MODEL")
        return {}
    served = parse_models([options.serve], "--serve")
    slo = plain(ServingSlo.parse(options.slo))
    return {
        "models": {**table.get("models", {}), **plain(served)},
        "serving": {"model": next(iter(served)), "slo": slo, "lend": options.lend},
    }


def _default_models(folder: "StateDirectory") -> dict[str, Path]:
    """Without a model the service still starts: with a tiny one of random weights."""
    from slackwater.cli.model_names import run_model_command

    directory = folder.root / "models" / "tiny"
    if not (directory / "config.json").is_file():
        print("no --model given: making a tiny one of random weights", file=sys.stderr)
        run_model_command("make", "tiny", "--models", str(directory.parent))
    return {"tiny": directory}
