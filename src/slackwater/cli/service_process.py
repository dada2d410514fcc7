"""The process of a service in the foreground: what `slackwater up` becomes."""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from slackwater.cli.background_start import HOW_TO_STOP
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.wire.memory import keep_heap_small


def run_service(settings: ServiceSettings, folder: StateDirectory) -> int:
    """Serve on this folder, which is locked, until a signal comes; the exit status."""
    keep_heap_small()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(settings, folder))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, folder))


async def _serve(settings: ServiceSettings, folder: StateDirectory) -> int:
    # Threads that write or read give way to the event loop soon: it wants to go on some twenty
    # times for one request.
    sys.setswitchinterval(0.0002)
    from slackwater.cli.preflight import check_isolation
    from slackwater.runtime.services.garbage import collect_when_idle
    from slackwater.serve.app import create_app
    from slackwater.serve.front.channel import FrontChannel
    from slackwater.serve.front.processes import FrontEnds
    from slackwater.serve.http.server import bind, until_signalled
    from slackwater.weights.joined_file import ExportCatalog

    folder.logs.mkdir(parents=True, exist_ok=True)
    _log_to(folder.logs / "service.log")
    listening = bind(settings.host, settings.port)
    reached_at = _reached_at(settings.host, listening.getsockname()[1])
    plane = ControlPlane(settings, folder, ExportCatalog(folder.weights), reached_at)
    check_isolation(settings, len(plane.tenants.names()))
    url = f"http://{settings.host}:{listening.getsockname()[1]}"
    key = plane.tenants.key_of(settings.tenants[0])
    app = create_app(plane)
    channel = FrontChannel(plane)
    fronts = FrontEnds(channel, app, listening, folder)
    await fronts.start(settings.front_ends)  # they take a while, too
    try:
        await plane.start()
    except BaseException:
        await fronts.stop()
        raise
    channel.open()
    try:
        join = plane.join_address()
        told = {"hub": join.hub, "depot": join.depot, "pin": join.pin}
        folder.write_server({"pid": os.getpid(), "url": url, "key": key, "join": told})
        _announce(plane, url, settings, folder)
        collecting = collect_when_idle(lambda: plane.rollout.live() == 0)
        sampling = app.state.dashboard.sampler.run()
        works = (collecting, plane.loop_watch.run(), sampling)
        beside = [asyncio.create_task(work) for work in works]
        signalled = await until_signalled(plane)
        await plane.drivers.close()  # while they can still say goodbye
        plane.release_waiters()
        await fronts.stop()
        for task in beside:
            task.cancel()
        folder.write_timeline(app.state.dashboard.sampler.trace())
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
    """Log everything to the file, and warnings to the terminal too."""
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
    """Whether a record is anything but a request cancelled by a stop."""
    return record.exc_info is None or record.exc_info[0] is not asyncio.CancelledError


def _announce(
    plane: ControlPlane, url: str, settings: ServiceSettings, folder: StateDirectory
) -> None:
    print(f"url    {url}")
    for name in settings.tenants:
        print(f"key    {plane.tenants.key_of(name)}   ({name})")
    for base in plane.bases:
        print(f"model  {base.name}   ({base.directory})")
    print(f"state  {folder.root}")
    print(f"watch  {url}/dashboard   (log in with a key)")
    print(HOW_TO_STOP, flush=True)
