"""`slackwater up`: start the service, in the foreground or behind."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from slackwater.model.errors import ConfigError, RefusedError

app = typer.Typer(add_completion=False)

DEFAULT_STATE = Path("~/.local/share/slackwater")


def parse_models(given: list[str]) -> dict[str, Path]:
    """`NAME=DIRECTORY`, or a directory that is its own name."""
    models: dict[str, Path] = {}
    for item in given:
        name, equals, directory = item.partition("=")
        path = Path(directory if equals else item).expanduser()
        if not path.is_dir():
            raise ConfigError.of(
                "--model", item, "must be NAME=DIRECTORY or DIRECTORY, which exists"
            )
        name = name if equals else str(path.resolve())
        if not name or name in models:
            raise ConfigError.of("--model", item, "needs a name of its own")
        models[name] = path
    return models


@app.command()
def up(
    model: Annotated[
        list[str] | None,
        typer.Option(help="NAME=DIRECTORY of a base model; repeat for more. Default: a tiny one."),
    ] = None,
    engines: Annotated[int, typer.Option(help="Engine processes per model.")] = 1,
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
        str, typer.Option(help="auto, process or bubblewrap; auto takes bubblewrap where it runs.")
    ] = "auto",
    sandbox_folder: Annotated[
        Path | None, typer.Option(help="Folder for environments. Root's must be open to others.")
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
) -> int:
    """Start the service: prints its URL and a key, runs until Ctrl-C or `slackwater down`."""
    from slackwater.cli.preflight import check_device, check_models
    from slackwater.runtime.launch.fleet_file import read_fleet_file
    from slackwater.runtime.launch.instance_list import InstanceList, read_instance_list
    from slackwater.runtime.settings import ServiceSettings
    from slackwater.runtime.store.state_directory import StateDirectory

    os.umask(0o077)  # keys, prompts and weights are nobody else's to read
    folder = StateDirectory(state)
    if background:
        return _start_behind(folder)
    if fleet is None:
        check_device(device)
    only_actions = sandboxes > 0 and engines == 0 and trainers == 0
    models = parse_models(model or []) or ({} if only_actions else _default_models(folder))
    settings = ServiceSettings(
        state=folder.root,
        models=models,
        engines=engines,
        local_engines=local_engines,
        instances=InstanceList() if instances is None else read_instance_list(instances),
        trainers=trainers,
        fleet_file=None if fleet is None else read_fleet_file(fleet),
        sandboxes=sandboxes,
        sandbox_backend=sandbox_backend,
        sandbox_folder=sandbox_folder,
        max_waiting_actions=max_waiting_actions,
        tenants=tuple(dict.fromkeys(tenant or ["default"])),
        host=host,
        port=port,
        database_url=database,
        record=record,
        device=device,
        train_dtype=train_dtype,
        threads=threads,
        kv_mb=kv_mb,
        max_running=max_running,
        session_silent_after_s=session_timeout,
    )
    if engines + local_engines:
        check_models(models)
    folder.lock()
    try:
        return _run(settings, folder)
    finally:
        folder.unlock()


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
    sys.setswitchinterval(0.001)  # threads that tokenise or decode give way to the event loop soon
    from slackwater.runtime.plane import ControlPlane
    from slackwater.serve.app import create_app
    from slackwater.serve.http.server import bind, http_server, serve_until_signalled
    from slackwater.weights.catalog import VersionCatalog

    folder.logs.mkdir(parents=True, exist_ok=True)
    _log_to(folder.logs / "service.log")
    listening = bind(settings.host, settings.port)
    plane = ControlPlane(settings, folder, VersionCatalog(folder.weights))
    url = f"http://{settings.host}:{listening.getsockname()[1]}"
    key = plane.tenants.key_of(settings.tenants[0])
    server = http_server(create_app(plane))
    await plane.start()
    try:
        join = plane.join_address()
        told = {"hub": join.hub, "depot": join.depot, "secret": join.secret, "pin": join.pin}
        folder.write_server({"pid": os.getpid(), "url": url, "key": key, "join": told})
        _announce(plane, url, settings, folder)
        signalled = await serve_until_signalled(server, listening, plane)
    finally:
        await plane.stop()
    if signalled is None:
        print(f"slackwater: a part of the service died; see {folder.logs}", file=sys.stderr)
        return 1
    print("stopped", file=sys.stderr)
    return 130 if signalled == signal.SIGINT else 0


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
        if folder.read_server() is not None and folder.is_locked():
            print(output.read_text(), end="")
            return 0
        time.sleep(0.05)
    process.terminate()
    raise RefusedError(f"it was not ready after 120 s; see {output}")
