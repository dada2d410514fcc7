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

from slackwater.serve.front.channel import FrontChannel
from slackwater.serve.front.sockets import CHANNEL, HTTP
from slackwater.serve.http.server import HttpServer, http_server

logger = logging.getLogger(__name__)

_AGAIN_S = 0.2  # between two starts of one that dies at once
_LEAVE_S = 10.0


class FrontEnds:
    """`count` processes that accept from one listening socket."""

    def __init__(
        self, channel: FrontChannel, app: FastAPI, listening: socket.socket, log: Path
    ) -> None:
        self._channel, self._app, self._listening, self._log = channel, app, listening, log
        # Not in the state directory: a socket's path has at most a hundred bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="slackwater-"))
        self._keeping: list[asyncio.Task[None]] = []
        self._is_closing = False

    async def start(self, count: int) -> None:
        """Open the sockets and start the processes."""
        loop = asyncio.get_running_loop()
        path = str(self._folder / CHANNEL)
        self._server = await loop.create_unix_server(self._channel.connect, path)
        self._http: HttpServer = http_server(self._app, private=True)
        door = socket.socket(socket.AF_UNIX)
        door.bind(str(self._folder / HTTP))
        door.listen(2048)
        self._serving = asyncio.create_task(self._http.serve(sockets=[door]))
        self._keeping = [asyncio.create_task(self._keep()) for _ in range(count)]
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
        self._http.should_exit = True
        await self._serving
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("front ends cannot be started", exc_info=error)
            self._channel.plane.failed.set()

    async def _keep(self) -> None:
        """One process, started again whenever it ends."""
        while not self._is_closing:
            process = await self._spawn()
            try:
                status = await process.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                raise
            if not self._is_closing:
                logger.warning("a front end ended status=%d; it is started again", status)
                await asyncio.sleep(_AGAIN_S)

    async def _spawn(self) -> asyncio.subprocess.Process:
        listening = self._listening.fileno()
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "slackwater.serve.front"),
                *(str(self._folder), str(listening)),
                pass_fds=(listening,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
