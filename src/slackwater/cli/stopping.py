"""Ending well when asked to: what is half done is taken away."""

import signal
import sys
from types import FrameType


def unwind_on_terminate() -> None:
    """Let SIGTERM unwind the stack like Ctrl-C, so that partial files are removed (exit 143)."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)
