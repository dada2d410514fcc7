"""One end of a channel between a front end and the control plane; writes are batched."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import cast

from slackwater.wire.frames import FrameDecoder, FrameError
from slackwater.wire.front import Record, encode_record, join_records

logger = logging.getLogger(__name__)
CHANNEL, HTTP = "channel", "http"  # the control plane's sockets, in a folder of its user only

_GATHER_S = 0.004
GATHER_SHARED_S = 0.001  # several tenants: one tenant's records delay the others'
_MAX_UNREAD_BYTES = 256 << 20  # a peer with this much unread is stuck


class ChannelConnection(asyncio.Protocol):
    """Calls `on_frame` with the body of each frame, and `on_lost` once when the connection ends.

    Records of `gather_s` go out in one write, because a write and the wake-up of its reader cost
    more than the bytes. With 0, the records of one round of the event loop do.
    """

    def __init__(
        self,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[], None],
        gather_s: float = _GATHER_S,
    ) -> None:
        self._on_frame, self._on_lost, self.gather_s = on_frame, on_lost, gather_s
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._records: list[bytes] = []
        self._timer: asyncio.Handle | None = None
        self._flushed_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame.body)
        except FrameError as error:
            logger.warning("a channel is closed: %s", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def send(self, record: Record) -> None:
        """Write soon, with other records; after the connection's end this does nothing.

        The record is encoded here, so that an encoding error reaches its sender alone.
        """
        self.put(record)
        self.schedule_flush()

    def put(self, record: Record) -> None:
        """Add to the next write without scheduling one."""
        self._records.append(encode_record(record))

    def schedule_flush(self) -> None:
        if self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        in_s = self._flushed_s + self.gather_s - time.monotonic()
        if in_s > 0:
            self._timer = loop.call_later(in_s, self.flush)
        else:
            self._timer = loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write the gathered records now."""
        records, self._records = self._records, []
        self._timer = None
        if self._transport is None or not records:
            return
        self._flushed_s = time.monotonic()
        self._transport.write(join_records(records))
        if self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            logger.warning("a channel is closed: its peer reads nothing")
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
