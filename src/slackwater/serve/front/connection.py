"""One end of a channel: records in, records out, gathered for a while."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import cast

from slackwater.wire.frames import FrameDecoder, FrameError
from slackwater.wire.front import Record, encode_record, join_records

logger = logging.getLogger(__name__)

_GATHER_S = 0.004
_MOST_UNREAD_BYTES = 256 << 20  # a peer that lets so much wait is stuck


class ChannelConnection(asyncio.Protocol):
    """`heard` gets the body of each frame; `lost` is called once, whoever closed it.

    Records of `gather_s` go together: a write, and its reader's waking up, cost more than what is
    written. With none, those of one round of the event loop do, and nobody wakes up to write.
    """

    def __init__(
        self,
        heard: Callable[[bytes], None],
        lost: Callable[[], None],
        gather_s: float = _GATHER_S,
    ) -> None:
        self._heard, self._lost, self._gather_s = heard, lost, gather_s
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._timer: asyncio.Handle | None = None
        self._flushed_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._heard(frame.body)
        except FrameError as error:
            logger.warning("a channel is closed: %s", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, record: Record) -> None:
        """Goes with others, at once where nothing went lately. After the end it goes nowhere.

        Encoded here: what cannot be is its sender's error, and does not take others' along.
        """
        self._out.append(encode_record(record))
        self.due_soon()

    def put(self, record: Record) -> None:
        """Goes with the next write, which somebody else has asked for."""
        self._out.append(encode_record(record))

    def due_soon(self) -> None:
        """Have `flush` called soon."""
        if self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        in_s = self._flushed_s + self._gather_s - time.monotonic()
        if in_s > 0:
            self._timer = loop.call_later(in_s, self.flush)
        else:
            self._timer = loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what waits now."""
        out, self._out = self._out, []
        self._timer = None
        if self._transport is None or not out:
            return
        self._flushed_s = time.monotonic()
        self._transport.write(join_records(out))
        if self._transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            logger.warning("a channel is closed: its peer reads nothing")
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
