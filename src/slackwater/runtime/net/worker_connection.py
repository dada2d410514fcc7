"""The connection of an authenticated worker: delivers its frames as they arrive.

A step of an engine is one small write, so this is a protocol and not a stream with a task: waking a
task and setting a deadline for every read cost more than handling the frame.
"""

import asyncio
from collections.abc import Callable, Sequence

from slackwater.wire.frames import Frame, FrameDecoder, FrameError

_LAST_LOOK_S = 0.5
_FRAMES_AT_ONCE = 16  # an engine that was not read for a while has sent thousands


class WorkerConnection(asyncio.Protocol):
    """Takes over a transport; `ended` is why it ended, once all frames are delivered.

    Many frames at once are delivered in slices, so that the event loop can do other work in
    between.
    """

    def __init__(
        self,
        decoder: FrameDecoder,
        handle_frames: Callable[[Sequence[Frame]], None],
        *,
        silent_after_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._decoder, self._handle_frames = decoder, handle_frames
        self._silent_after_s = silent_after_s
        self._heard_s = self._loop.time()
        self._frames: Sequence[Frame] = ()
        self._ending: str | None = None
        self._is_paused = False
        self._transport: asyncio.Transport

    def take_over(
        self, transport: asyncio.Transport, reader: asyncio.StreamReader, frames: Sequence[Frame]
    ) -> None:
        """From the reader, which holds nothing; these frames came with the hello."""
        self._transport = transport
        transport.set_protocol(self)
        self._watch = self._loop.call_later(self._silent_after_s, self._check_silence, False)
        self.ended.add_done_callback(lambda _: self._watch.cancel())
        self._pass_on(frames)
        if reader.at_eof() or transport.is_closing():
            self.connection_lost(reader.exception())

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        try:
            frames = self._decoder.feed(data)
        except FrameError as error:
            self._end(str(error))
        else:
            self._pass_on(frames)

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self._decoder.finish()
        except FrameError as error:  # it broke inside a frame
            self._end(str(error))
        else:
            self._end(str(exc) if exc else "it closed the connection")

    def _pass_on(self, frames: Sequence[Frame]) -> None:
        if self._frames:
            self._frames = [*self._frames, *frames]
        elif frames:
            self._frames = frames
            self._deliver()

    def _deliver(self) -> None:
        if self.ended.done():
            return
        some, self._frames = self._frames, ()
        if len(some) > _FRAMES_AT_ONCE:
            some, self._frames = some[:_FRAMES_AT_ONCE], some[_FRAMES_AT_ONCE:]
        try:
            self._handle_frames(some)
        except FrameError as error:
            self._frames = ()
            self._end(str(error))
        except Exception as error:  # noqa: BLE001  (the waiter of `ended` gets it)
            self.ended.set_exception(error)
        else:
            if self._frames or self._is_paused or self._ending is not None:
                self._read_on()

    def _read_on(self) -> None:
        """Now, or after what came already."""
        if self._frames:
            self._loop.call_soon(self._deliver)
            if not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()
        elif self._ending is not None:
            self._end(self._ending)
        elif not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def _end(self, why: str) -> None:
        self._ending = self._ending or why
        if not self._frames and not self.ended.done():
            self.ended.set_result(self._ending)

    def _check_silence(self, last: bool) -> None:
        """End a silent connection; after a blocked loop, first read what arrived meanwhile."""
        left_s = self._heard_s + self._silent_after_s - self._loop.time()
        if left_s > 0 or self._frames:
            self._watch = self._loop.call_later(
                max(left_s, _LAST_LOOK_S), self._check_silence, False
            )
        elif not last:
            self._watch = self._loop.call_later(_LAST_LOOK_S, self._check_silence, True)
        else:
            self._end(f"nothing was heard of it for {self._silent_after_s:g} s")
