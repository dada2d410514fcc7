"""One end of a channel: records in, records out, one frame per round of the event loop."""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from slackwater.wire.frames import FrameDecoder, FrameError
from slackwater.wire.front import Record, encode_records

logger = logging.getLogger(__name__)

_MOST_UNREAD_BYTES = 256 << 20  # a peer that lets so much wait is stuck


class Connection(asyncio.Protocol):
    """`heard` gets the body of each frame; `lost` is called once, whoever closed it."""

    def __init__(self, heard: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._heard, self._lost = heard, lost
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._out: list[Record] = []

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
        """Goes with all others of this round of the loop; after the end it goes nowhere."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self.flush)
        self._out.append(record)

    def flush(self) -> None:
        """Write what waits now."""
        out, self._out = self._out, []
        if self._transport is None or not out:
            return
        self._transport.write(encode_records(out))
        if self._transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            logger.warning("a channel is closed: its peer reads nothing")
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
