"""Starts, restarts and stops the front-end processes of a control plane."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path

from fastapi import FastAPI

from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.serve.front.channel import FrontChannel
from slackwater.serve.front.connection import CHANNEL, HTTP
from slackwater.serve.http.body_file import remove_body_files
from slackwater.serve.http.server import PrivateServer
from slackwater.wire.forked_process import fork, has_one_thread

logger = logging.getLogger(__name__)

_RESTART_S, _MAX_RESTART_S = 0.2, 10.0  # pause before a restart; doubles up to the second
_HEALTHY_S = 10.0  # a process that lived this long was not broken from the start
_STOP_S = 10.0
_PATH_BYTES = 4096


class ForkedFront:
    """A front end that was forked from the control plane, whose modules it need not import. It
    imports the others, and serves once the control plane says where its sockets are.
    """

    def __init__(self, listening: socket.socket, log: Path) -> None:
        command = _front_command(Path(), listening, log)
        orders, self._orders = os.pipe()
        run = partial(_serve_on_order, orders, listening, log)
        self._process = fork(run, command, [orders, listening.fileno()])
        self.pid = self._process.pid
        os.close(orders)

    def begin(self, folder: Path) -> None:
        os.write(self._orders, os.fsencode(folder))
        os.close(self._orders)

    async def wait(self) -> int:
        return await self._process.wait_in_loop()

    def kill(self) -> None:
        self._process.kill()


def fork_front_ends(
    count: int, listening: socket.socket, state: StateDirectory
) -> list[ForkedFront]:
    """The first front ends; none where a fork is not safe, and they are started as programs."""
    if not (has_one_thread() and _can_watch_processes()):
        return []
    return [ForkedFront(listening, _log(state, number)) for number in range(count)]


def _can_watch_processes() -> bool:
    """Whether the kernel tells an event loop that a process has ended."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _serve_on_order(orders: int, listening: socket.socket, log: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal: the control plane stops us
        signal.signal(number, signal.SIG_IGN)
    from slackwater.serve.front.__main__ import run_front  # the control plane needs none of it

    if folder := os.read(orders, _PATH_BYTES):
        run_front(Path(os.fsdecode(folder)), listening, log)


def _front_command(folder: Path, listening: socket.socket, log: Path) -> list[str]:
    module = "slackwater.serve.front"
    return [sys.executable, "-m", module, str(folder), str(listening.fileno()), str(log)]


def _log(state: StateDirectory, number: int) -> Path:
    return state.logs / f"front-{number}.log"


class FrontEnds:
    """`count` processes that accept from one listening socket; those that are `forked` first."""

    def __init__(
        self,
        channel: FrontChannel,
        app: FastAPI,
        listening: socket.socket,
        state: StateDirectory,
        forked: list[ForkedFront],
    ) -> None:
        self._channel, self._app, self._listening = channel, app, listening
        self._state, self._link = state, state.root / "sockets"
        self._forked = forked
        self._folder = socket_folder(self._link)
        self._restarters: list[asyncio.Task[None]] = []
        self._is_closing = False

    async def start(self, count: int) -> None:
        """Open the sockets and start the processes."""
        loop = asyncio.get_running_loop()
        path = str(self._folder / CHANNEL)
        self._server = await loop.create_unix_server(self._channel.connect, path)
        self._http = PrivateServer(self._app, self._folder / HTTP)
        self._serving = asyncio.create_task(self._http.serve())
        self._restarters = [
            asyncio.create_task(self._keep_running(number)) for number in range(count)
        ]
        for task in self._restarters:
            task.add_done_callback(self._report_failure)

    async def stop(self) -> None:
        """Let them answer open requests; kill those that do not end in time."""
        self._is_closing = True
        grace_s = _STOP_S if self._channel.is_open else 0  # before, they have no request
        self._channel.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*self._restarters, return_exceptions=True)
        for task in self._restarters:
            task.cancel()
        await asyncio.gather(*self._restarters, return_exceptions=True)
        self._channel.close()
        self._server.close()
        self._http.stop()
        await self._serving
        await asyncio.to_thread(remove_socket_folder, self._link)

    def _report_failure(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("front ends cannot be started", exc_info=error)
            self._channel.plane.failed.set()

    async def _keep_running(self, number: int) -> None:
        """Run one process, and restart it whenever it ends."""
        pause_s, loop = _RESTART_S, asyncio.get_running_loop()
        while not self._is_closing:
            began_s = loop.time()
            process = await self._spawn(number)
            try:
                status = await process.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                raise
            await asyncio.to_thread(remove_body_files, self._folder, process.pid)
            if not self._is_closing:
                logger.warning("a front end ended status=%d; it is started again", status)
                was_healthy = loop.time() - began_s > _HEALTHY_S
                pause_s = _RESTART_S if was_healthy else min(2 * pause_s, _MAX_RESTART_S)
                await asyncio.sleep(pause_s)

    async def _spawn(self, number: int) -> asyncio.subprocess.Process | ForkedFront:
        if self._forked:
            front = self._forked.pop()
            front.begin(self._folder)
            return front
        log = _log(self._state, number)
        return await asyncio.create_subprocess_exec(
            *_front_command(self._folder, self._listening, log),
            pass_fds=(self._listening.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
        )


def socket_folder(link: Path) -> Path:
    """Make a new temporary folder for sockets and point `link` at it.

    The folder is not in the state directory because a socket's path has at most about 100 bytes. A
    folder that a killed control plane left is removed.
    """
    remove_socket_folder(link)
    folder = Path(tempfile.mkdtemp(prefix="slackwater-"))
    link.symlink_to(folder)
    return folder


def remove_socket_folder(link: Path) -> None:
    if link.is_symlink():
        shutil.rmtree(link.readlink(), ignore_errors=True)
        link.unlink()
