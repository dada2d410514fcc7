"""The process of the service, which `slackwater up` becomes."""

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from slackwater.cli.background_start import STOP_HINT
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.garbage import collect_when_idle
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.serve.app import create_app
from slackwater.serve.front.channel import FrontChannel
from slackwater.serve.front.processes import ForkedFront, FrontEnds, fork_front_ends
from slackwater.serve.http.server import bind, catch_stop_signals, run_server, until_signalled
from slackwater.weights.joined_file import ExportCatalog
from slackwater.wire.memory import keep_heap_small


def run_service(settings: ServiceSettings, folder: StateDirectory) -> int:
    """Serve on this locked folder until a signal; returns the exit status."""
    early: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # to raise during a fork would lose the signal
        signal.signal(number, lambda received, _: early.append(received))
    keep_heap_small()
    folder.logs.mkdir(parents=True, exist_ok=True)
    listening = bind(settings.host, settings.port)
    fronts = fork_front_ends(settings.front_ends, listening, folder)  # before the first thread
    return run_server(_serve(settings, folder, listening, fronts, early))


async def _serve(
    settings: ServiceSettings,
    folder: StateDirectory,
    listening: socket.socket,
    forked: list[ForkedFront],
    early: list[int],
) -> int:
    """`early` are the signals that came before the event loop could handle them."""
    stopping = catch_stop_signals()
    if early:
        stopping.set_result(early[0])
    from slackwater.cli.preflight import check_isolation

    _log_to(folder.logs / "service.log")
    local_url = _local_url(settings.host, listening.getsockname()[1])
    plane = ControlPlane(settings, folder, ExportCatalog(folder.weights), local_url)
    check_isolation(settings, len(plane.tenants.names()))
    url = service_url(settings.host, listening.getsockname()[1])
    key = plane.tenants.key_of(settings.tenants[0])
    app = create_app(plane)
    channel = FrontChannel(plane)
    fronts = FrontEnds(channel, app, listening, folder, forked)
    await fronts.start(settings.front_ends)  # first: they take a while to start
    starting = asyncio.create_task(plane.start())
    stopping.add_done_callback(lambda _: starting.cancel())
    try:
        await starting
    except BaseException:
        await fronts.stop()
        if not stopping.done():
            raise
        plane.fleet.stop_restarts()
        await plane.hub.close()
        await plane.fleet.close()  # its agents would outlive this process
        print("stopped", file=sys.stderr)
        return 128 + stopping.result()
    channel.open()
    try:
        join = plane.fleet.join_address()
        address = {"hub": join.hub, "depot": join.depot, "pin": join.pin}
        folder.write_server({"pid": os.getpid(), "url": url, "key": key, "join": address})
        _announce(plane, url, settings, folder)
        collecting = collect_when_idle(lambda: plane.rollout.count_live_turns() == 0)
        sampling = app.state.dashboard.sampler.run()
        works = (collecting, plane.loop_watch.run(), sampling)
        beside = [asyncio.create_task(work) for work in works]
        signalled = await until_signalled(plane, stopping)
        await plane.drivers.close()  # while they can still end their sessions
        plane.release_waiters()
        await fronts.stop()
        for task in beside:
            task.cancel()
        folder.write_timeline(app.state.dashboard.sampler.trace())
    finally:
        await plane.stop()
    if signalled is None:
        print(f"slackwater: a part of the service failed; see {folder.logs}", file=sys.stderr)
        return 1
    print("stopped", file=sys.stderr)
    return 130 if signalled == signal.SIGINT else 0


def _local_url(host: str, port: int) -> str:
    """The URL at which processes of this machine reach the service."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # the address for a wildcard bind
    address = loopback.get(host, host)
    return service_url(address, port)


def service_url(host: str, port: int) -> str:
    """The URL of an address; those of IPv6 stand in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _log_to(file: Path) -> None:
    """Log everything to the file, and warnings to the terminal too."""
    file_handler = logging.FileHandler(file)
    file_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    warnings = logging.StreamHandler()
    warnings.setLevel(logging.WARNING)
    warnings.setFormatter(logging.Formatter("slackwater: %(message)s"))
    for handler in (file_handler, warnings):
        handler.addFilter(_is_no_cancellation)
    logging.basicConfig(level=logging.INFO, handlers=[file_handler, warnings])
    logging.raiseExceptions = False  # a full disk loses log lines without printing tracebacks


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """False for requests that the stop cancelled."""
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
    print(STOP_HINT, flush=True)
