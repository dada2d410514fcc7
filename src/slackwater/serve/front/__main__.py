"""`python -m slackwater.serve.front FOLDER FD LOG`: a front-end process.

It serves on the inherited listening socket FD, talks to the control plane over the sockets in
FOLDER, and ends with the control plane.
"""

import asyncio
import logging
import signal
import socket
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from slackwater.runtime.services.garbage import collect_when_idle
from slackwater.serve.front.app import create_front_app
from slackwater.serve.front.connection import CHANNEL, HTTP
from slackwater.serve.front.gateway import Gateway
from slackwater.serve.front.pass_through import PassThrough
from slackwater.serve.http.server import HttpServer, run_server
from slackwater.wire.memory import keep_heap_small

_LARGE_BYTES = 2 << 20  # keep socket read buffers (256 KiB) on the heap, where they are reused


async def serve(folder: Path, listening: socket.socket) -> None:
    """Serve until the control plane stops this process or dies."""
    gateway = Gateway()
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: gateway.connection, str(folder / CHANNEL))
    if not await gateway.ready:
        return
    behind = PassThrough(folder / HTTP)
    app = create_front_app(gateway, behind, folder)
    server = HttpServer(app, several_tenants=gateway.loop_shares.is_shared)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    stopping = asyncio.create_task(gateway.stopping.wait())
    collecting = asyncio.create_task(collect_when_idle(lambda: gateway.is_idle))
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    collecting.cancel()
    server.stop_accepting()
    listening.close()  # the next service may bind the port
    server.should_exit = True
    await serving
    await behind.close()
    gateway.close()


def log_to(path: Path, max_bytes: int = 1 << 20) -> None:
    """Log warnings to `path`, keeping two files of at most `max_bytes`."""
    rotating = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=1)
    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, handlers=[rotating], force=True)


def run_front(folder: Path, listening: socket.socket, log: Path) -> None:
    """Be a front end to the end of the control plane."""
    keep_heap_small(_LARGE_BYTES)
    log_to(log)
    for number in (signal.SIGINT, signal.SIGTERM):  # the control plane stops us
        signal.signal(number, signal.SIG_IGN)
    run_server(serve(folder, listening))


if __name__ == "__main__":
    run_front(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), Path(sys.argv[3]))
