"""`slackwater up`: start the service, in the foreground or behind."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from slackwater.model.config import decode, override, plain
from slackwater.model.errors import ConfigError, RefusedError
from slackwater.model.toml_text import toml_text

app = typer.Typer(add_completion=False)

DEFAULT_STATE = Path("~/.local/share/slackwater")


def parse_models(given: list[str], option: str = "--model") -> dict[str, Path]:
    """`NAME=DIRECTORY`, or a directory that is its own name."""
    models: dict[str, Path] = {}
    for item in given:
        name, equals, directory = item.partition("=")
        path = Path(directory if equals else item).expanduser()
        if not path.is_dir():
            raise ConfigError.of(option, item, "must be NAME=DIRECTORY or DIRECTORY, which exists")
        name = name if equals else str(path.resolve())
        if not name or name in models:
            raise ConfigError.of("--model", item, "needs a name of its own")
        models[name] = path
    return models


# Options that are called otherwise in a configuration file.
_SETTINGS_OF = {"database": "database_url", "session_timeout": "session_silent_after_s"}
_PLAIN = (
    *("engines", "local_engines", "trainers", "sandboxes", "sandbox_backend", "sandbox_folder"),
    "sandbox_image",
    *("max_waiting_actions", "host", "port", "database", "device", "train_dtype", "threads"),
    *("kv_mb", "max_running", "record", "session_timeout"),
)


def settings_table(
    config: Path | None, flags: dict[str, Any], changes: list[str]
) -> dict[str, Any]:
    """What the service is to be: the file, then the options that were given, then `--set`."""
    table: dict[str, Any] = {}
    if config is not None:
        try:
            table = tomllib.loads(config.read_text(encoding="utf-8"))
        except OSError as error:
            fix = f"cannot be read: {error.strerror}"
            raise ConfigError.of("--config", str(config), fix) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError.of("--config", str(config), f"is not TOML: {error}") from None
    return override(table | flags, changes)


def _given(ctx: typer.Context) -> dict[str, Any]:
    """The plain options that stand on the command line, by the names of a configuration file."""
    given = [name for name in _PLAIN if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")]
    return {_SETTINGS_OF.get(name, name): plain(ctx.params[name]) for name in given}


@app.command()
def up(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(help="NAME=DIRECTORY of a base model; repeat for more. Default: a tiny one."),
    ] = None,
    engines: Annotated[int, typer.Option(help="Engine processes per model.")] = 1,
    serve: Annotated[
        str | None, typer.Option(help="NAME=DIRECTORY of a model to serve with a promise (--slo).")
    ] = None,
    slo: Annotated[
        str, typer.Option(help="The promise, seconds at p99: ttft=0.5,tpot=0.15.")
    ] = "ttft=0.5,tpot=0.15",
    lend: Annotated[
        bool, typer.Option("--lend", help="The served model's devices roll out for the others.")
    ] = False,
    instances: Annotated[
        Path | None, typer.Option(help="TOML list of further instances, also vLLM servers.")
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(help="TOML of pools and nodes; --engines and --trainers do not count then."),
    ] = None,
    local_engines: Annotated[
        int,
        typer.Option(help="Engines per model that work while the trainers have nothing to do."),
    ] = 0,
    trainers: Annotated[int, typer.Option(help="Trainer processes.")] = 1,
    sandboxes: Annotated[
        int, typer.Option(help="Sandbox processes that run actions; they share the cores.")
    ] = 0,
    sandbox_backend: Annotated[
        str, typer.Option(help="auto (bubblewrap where it runs), process, bubblewrap or docker.")
    ] = "auto",
    sandbox_folder: Annotated[
        Path | None, typer.Option(help="Folder for environments. Root's must be open to others.")
    ] = None,
    sandbox_image: Annotated[
        str | None, typer.Option(help="Image of docker's containers; default python:3.11-slim.")
    ] = None,
    max_waiting_actions: Annotated[
        int, typer.Option(help="Actions that may wait; what comes beyond them is refused (429).")
    ] = 20_000,
    state: Annotated[Path, typer.Option(help="Folder for everything it keeps.")] = DEFAULT_STATE,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8123,
    tenant: Annotated[
        list[str] | None, typer.Option(help="Tenants, each with a key of its own.")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="Database URL, such as postgresql://...; default SQLite.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    train_dtype: Annotated[
        str | None,
        typer.Option(
            help="float32 or bfloat16, with fp32 master weights. Default: bfloat16 on cuda."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="Compute threads per worker.")] = 1,
    kv_mb: Annotated[int, typer.Option(help="KV cache of each engine, in MiB.")] = 1024,
    max_running: Annotated[int, typer.Option(help="Turns that an engine runs at once.")] = 64,
    session_timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which a client's session ends.")
    ] = 300.0,
    record: Annotated[
        Path | None, typer.Option(help="Record the controllers' events to this file.")
    ] = None,
    background: Annotated[
        bool, typer.Option("--background", help="Return once it is ready.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="TOML of all that is said here; options on the line win.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="a.b=value: change one setting; repeat.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration, start nothing.")
    ] = False,
) -> int:
    """Start the service: prints its URL and a key, runs until Ctrl-C or `slackwater down`."""
    from slackwater.cli.preflight import check_device, check_models
    from slackwater.runtime.launch.fleet_file import read_fleet_file
    from slackwater.runtime.launch.instance_list import read_instance_list
    from slackwater.runtime.settings import ServiceSettings
    from slackwater.runtime.store.state_directory import StateDirectory, write_whole

    os.umask(0o077)  # keys, prompts and weights are nobody else's to read
    table = settings_table(config, _given(ctx), changes or [])
    if model:
        table["models"] = plain(parse_models(model))
    if tenant:
        table["tenants"] = list(dict.fromkeys(tenant))
    if instances is not None:
        table |= plain(read_instance_list(instances))
    if fleet is not None:
        table["fleet"] = plain(read_fleet_file(fleet))
    table |= _serving_tables(table, serve, slo, lend)
    own_state = str(ctx.get_parameter_source("state")).endswith("COMMANDLINE")
    folder = StateDirectory(state if own_state else Path(table.get("state", state)))
    if background:
        return _start_behind(folder)
    table["state"] = str(folder.root)
    settings = decode(ServiceSettings, {"models": {}} | table)
    if dry_run:
        print(toml_text(plain(settings)), end="")
        return 0
    if settings.fleet is None:
        check_device(settings.device)
    if not settings.models and not settings.only_actions:
        settings = replace(settings, models=_default_models(folder))
    if settings.engines + settings.local_engines:
        check_models(dict(settings.models))
    folder.lock()
    try:
        write_whole(folder.root / "config.toml", toml_text(plain(settings)))
        return _run(settings, folder)
    finally:
        folder.unlock()


def _serving_tables(
    table: dict[str, Any], serve: str | None, slo: str, lend: bool
) -> dict[str, Any]:
    """What `--serve`, `--slo` and `--lend` say, as tables of a configuration file."""
    from slackwater.model.serving import ServingSlo

    if serve is None:
        if lend:
            raise ConfigError.of("--lend", True, "needs a served model: --serve NAME=DIRECTORY")
        return {}
    served = parse_models([serve], "--serve")
    promise = plain(ServingSlo.parse(slo))
    return {
        "models": {**table.get("models", {}), **plain(served)},
        "serving": {"model": next(iter(served)), "slo": promise, "lend": lend},
    }


def _default_models(folder: Any) -> dict[str, Path]:
    """Without a model the service still starts: with a tiny one of random weights."""
    directory: Path = folder.root / "models" / "tiny"
    if not (directory / "config.json").is_file():
        print("no --model given: making a tiny one of random weights", file=sys.stderr)
        make = ["model", "make", "tiny", "--models", str(directory.parent)]
        # In a process of its own, since it loads PyTorch, which the service does not.
        done = subprocess.run(
            [sys.executable, "-m", "slackwater", *make], stdout=subprocess.DEVNULL
        )
        if done.returncode:
            raise RefusedError(f"the tiny model could not be made in {directory}")
    return {"tiny": directory}


def _run(settings: Any, folder: Any) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(settings, folder))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, folder))


async def _serve(settings: Any, folder: Any) -> int:
    # Threads that write or read give way to the event loop soon: it wants to go on some twenty times for one request.
    sys.setswitchinterval(0.0002)
    from slackwater.runtime.plane import ControlPlane
    from slackwater.runtime.services.garbage import collect_when_idle
    from slackwater.serve.app import create_app
    from slackwater.serve.http.server import bind, http_server, serve_until_signalled
    from slackwater.weights.catalog import VersionCatalog

    folder.logs.mkdir(parents=True, exist_ok=True)
    _log_to(folder.logs / "service.log")
    listening = bind(settings.host, settings.port)
    plane = ControlPlane(settings, folder, VersionCatalog(folder.weights))
    url = f"http://{settings.host}:{listening.getsockname()[1]}"
    key = plane.tenants.key_of(settings.tenants[0])
    server = http_server(create_app(plane), several_tenants=plane.loop_shares.several)
    await plane.start(_reached_at(settings.host, listening.getsockname()[1]))
    try:
        join = plane.join_address()
        told = {"hub": join.hub, "depot": join.depot, "secret": join.secret, "pin": join.pin}
        folder.write_server({"pid": os.getpid(), "url": url, "key": key, "join": told})
        _announce(plane, url, settings, folder)
        collecting = collect_when_idle(lambda: plane.rollout.live() == 0)
        beside = [asyncio.create_task(work) for work in (collecting, plane.loop_watch.run())]
        signalled = await serve_until_signalled(server, listening, plane)
        for task in beside:
            task.cancel()
    finally:
        await plane.stop()
    if signalled is None:
        print(f"slackwater: a part of the service died; see {folder.logs}", file=sys.stderr)
        return 1
    print("stopped", file=sys.stderr)
    return 130 if signalled == signal.SIGINT else 0


def _reached_at(host: str, port: int) -> str:
    """Where processes of this machine find the service."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where others bind it to
    near = everywhere.get(host, host)
    return f"http://[{near}]:{port}" if ":" in near else f"http://{near}:{port}"


def _log_to(file: Path) -> None:
    """Everything to the file; warnings, such as a worker that died, to the terminal too."""
    whole = logging.FileHandler(file)
    whole.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    warnings = logging.StreamHandler()
    warnings.setLevel(logging.WARNING)
    warnings.setFormatter(logging.Formatter("slackwater: %(message)s"))
    for handler in (whole, warnings):
        handler.addFilter(_is_no_cancellation)
    logging.basicConfig(level=logging.INFO, handlers=[whole, warnings])
    logging.raiseExceptions = False  # a full disk costs log lines, not tracebacks about them


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Requests that are cut off by a stop are no errors."""
    return record.exc_info is None or record.exc_info[0] is not asyncio.CancelledError


def _announce(plane: Any, url: str, settings: Any, folder: Any) -> None:
    print(f"url    {url}")
    for name in settings.tenants:
        print(f"key    {plane.tenants.key_of(name)}   ({name})")
    for base in plane.bases:
        print(f"model  {base.name}   ({base.directory})")
    print(f"state  {folder.root}")
    print("stop with Ctrl-C, or `slackwater down` from elsewhere", flush=True)


def _start_behind(folder: Any) -> int:
    """Start the same command in a session of its own, and wait until it serves."""
    if folder.is_locked():
        folder.lock()  # says who has it
    arguments = [argument for argument in sys.argv[1:] if argument != "--background"]
    folder.logs.mkdir(parents=True, exist_ok=True)
    output = folder.logs / "up.log"
    output.unlink(missing_ok=True)  # one that an older version left may be readable by others
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "slackwater", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RefusedError(f"it did not start: {output.read_text().strip()}")
        if (folder.read_server() or {}).get("pid") == process.pid:  # not what a killed one left
            print(output.read_text(), end="")
            return 0
        time.sleep(0.05)
    process.terminate()
    raise RefusedError(f"it was not ready after 120 s; see {output}")
