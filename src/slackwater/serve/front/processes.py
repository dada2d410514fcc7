"""Front ends of a control plane, each a process: started, started again, and stopped."""

import asyncio
import contextlib
import logging
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from fastapi import FastAPI

from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.serve.front.channel import FrontChannel
from slackwater.serve.front.sockets import CHANNEL, HTTP
from slackwater.serve.http.server import PrivateServer

logger = logging.getLogger(__name__)

_AGAIN_S, _LONGEST_PAUSE_S = 0.2, 10.0  # before the next start of one that died
_LIVED_S = 10.0  # and was not broken from the start
_LEAVE_S = 10.0


class FrontEnds:
    """`count` processes that accept from one listening socket."""

    def __init__(
        self, channel: FrontChannel, app: FastAPI, listening: socket.socket, state: StateDirectory
    ) -> None:
        self._channel, self._app, self._listening = channel, app, listening
        self._logs, self._link = state.logs, state.root / "sockets"
        self._folder = socket_folder(self._link)
        self._keeping: list[asyncio.Task[None]] = []
        self._is_closing = False

    async def start(self, count: int) -> None:
        """Open the sockets and start the processes."""
        loop = asyncio.get_running_loop()
        path = str(self._folder / CHANNEL)
        self._server = await loop.create_unix_server(self._channel.connect, path)
        self._http = PrivateServer(self._app, self._folder / HTTP)
        self._serving = asyncio.create_task(self._http.serve())
        self._keeping = [asyncio.create_task(self._keep(number)) for number in range(count)]
        for task in self._keeping:
            task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Have them answer what is under way; whoever does not end is ended."""
        self._is_closing = True
        self._channel.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await asyncio.gather(*self._keeping, return_exceptions=True)
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        self._channel.close()
        self._server.close()
        self._http.stop()
        await self._serving
        await asyncio.to_thread(drop_socket_folder, self._link)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("front ends cannot be started", exc_info=error)
            self._channel.plane.failed.set()

    async def _keep(self, number: int) -> None:
        """One process, started again whenever it ends."""
        pause_s, loop = _AGAIN_S, asyncio.get_running_loop()
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
            if not self._is_closing:
                logger.warning("a front end ended status=%d; it is started again", status)
                lived = loop.time() - began_s > _LIVED_S
                pause_s = _AGAIN_S if lived else min(2 * pause_s, _LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s)

    async def _spawn(self, number: int) -> asyncio.subprocess.Process:
        listening, log = self._listening.fileno(), self._logs / f"front-{number}.log"
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "slackwater.serve.front"),
            *(str(self._folder), str(listening), str(log)),
            pass_fds=(listening,),
            stdin=asyncio.subprocess.DEVNULL,
        )


def socket_folder(link: Path) -> Path:
    """A new folder for sockets, which `link` names; the one before is that of a control plane that
    was killed, and goes. It is elsewhere, since a socket's path has at most a hundred bytes.
    """
    drop_socket_folder(link)
    folder = Path(tempfile.mkdtemp(prefix="slackwater-"))
    link.symlink_to(folder)
    return folder


def drop_socket_folder(link: Path) -> None:
    """Remove the folder and its name."""
    if link.is_symlink():
        shutil.rmtree(link.readlink(), ignore_errors=True)
        link.unlink()
