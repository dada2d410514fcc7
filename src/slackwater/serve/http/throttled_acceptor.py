"""Accepts a few connections per round of the event loop when there are several tenants.

A plain asyncio server accepts all pending connections and reads the first request of each: with a
thousand of them every other client waits for a tenth of a second.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

AT_ONCE, AT_ONCE_ALONE = 2, 1024  # with several tenants; with one
_RETRY_S = 1.0  # pause if the process has no free file descriptor


class ThrottledAcceptor:
    """Accepts connections until `close`; others wait in the kernel's backlog."""

    def __init__(
        self,
        listening: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
        at_once: int = AT_ONCE,
    ) -> None:
        self._at_once = at_once
        self._listening = listening
        self._new_protocol = new_protocol
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._open()

    def close(self) -> None:
        """Stop accepting; the owner closes the socket."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening.fileno())

    def _open(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(self._at_once):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no free file descriptor
                logger.warning("connections wait: %s", error)
                self._loop.remove_reader(self._listening.fileno())
                self._retry = self._loop.call_later(_RETRY_S, self._open)
                return
            entering = self._loop.create_task(self._enter(connection))
            self._entering.add(entering)
            entering.add_done_callback(self._entering.discard)

    async def _enter(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._new_protocol, connection)
        except OSError:  # the client has left already
            connection.close()


class LoopThrottle:
    """Runs callbacks in order, a few per round of the loop; use from its thread only."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def put(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run_batch)

    def _run_batch(self) -> None:
        self._is_due = False
        try:
            for _ in range(min(self._at_once, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            self._schedule()
