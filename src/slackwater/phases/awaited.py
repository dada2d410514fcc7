"""Whether one thread of this process waits for another to end: read from what each of them runs."""

import concurrent.futures
import sys
import threading
from collections.abc import Iterator
from types import FrameType


def is_awaited(thread: threading.Thread, *, by: threading.Thread) -> bool:
    """Whether `by` joins the thread or awaits a future that it computes.

    Other ways to wait (a queue, an event, a task) are invisible here.
    """
    computes = {id(future) for future in _futures_of(thread)}
    for frame in _frames(by):
        name, known = frame.f_code.co_name, frame.f_locals
        owner = known.get("self")
        if name == "join" and owner is thread:
            return True
        if name in ("result", "exception") and id(owner) in computes:
            return True
        if name in ("wait", "as_completed") and computes & {id(f) for f in known.get("fs", ())}:
            return True
    return False


def _futures_of(thread: threading.Thread) -> Iterator[concurrent.futures.Future[object]]:
    """Those that the thread, of a pool, computes now."""
    for frame in _frames(thread):
        future = getattr(frame.f_locals.get("self"), "future", None)
        if isinstance(future, concurrent.futures.Future):
            yield future


def _frames(thread: threading.Thread) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back
