"""A deployment's image in host memory: a memfd, alive as long as the node's manager holds it.

Its descriptor is passed to the worker, which maps the same pages. Pages are populated once, at the
first mapping, and reused for every switch: touching fresh ones costs ten times the copy.
"""

import mmap
import os
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.policy.state.layout import align_up

PAGE = 4096
Bytes = NDArray[np.uint8]

_SILENT_S = 120.0  # a disk that delivers nothing for so long has failed


class ImageArrivalProgress:
    """How many bytes of an image are valid; `failed` is the reason why no more will arrive."""

    def __init__(self) -> None:
        self.reached = 0
        self.failed: str | None = None
        self._changed = threading.Condition()
        self._listeners: list[Callable[[int, str | None], None]] = []

    def reach(self, reached: int) -> None:
        self._tell(reached, None)

    def fail(self, why: str) -> None:
        self._tell(self.reached, why)

    def listen(self, listener: Callable[[int, str | None], None]) -> None:
        """Call the listener with the current state now, and at every change."""
        with self._changed:
            self._listeners.append(listener)
            listener(self.reached, self.failed)

    def wait(self, wanted: int) -> None:
        """Wait until so many bytes are valid; UnavailableError if they will not arrive."""
        with self._changed:
            while self.reached < wanted:
                # A wake-up is not always progress: only a wait without any wake-up is a failure.
                if self.failed is None and not self._changed.wait(_SILENT_S):
                    raise UnavailableError("state: nothing arrives from the disk")
                if self.failed is not None:
                    raise UnavailableError(self.failed)

    def _tell(self, reached: int, failed: str | None) -> None:
        with self._changed:
            self.reached, self.failed = reached, failed
            self._changed.notify_all()
            for listener in self._listeners:
                listener(reached, failed)


def pages_for(size: int) -> int:
    return max(align_up(size, PAGE), PAGE)


class HostImage:
    """Shared memory of `bytes` bytes, in whole pages."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.bytes = size
        room = pages_for(size)
        self._map = mmap.mmap(descriptor, room, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.pages: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, name: str, size: int) -> "HostImage":
        """A new image of zeros; refused if the machine lacks the memory."""
        descriptor = os.memfd_create(f"slackwater-state-{name}"[:200], os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, pages_for(size))
            return cls(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise RefusedError(
                f"host memory: {size} bytes for the state of {name} are not available: {error}; "
                "lower the host budget"
            ) from error

    @property
    def data(self) -> Bytes:
        """The image without the padding of its last page."""
        return self.pages[: self.bytes]

    def close(self) -> None:
        """Free the memory, if no other process maps it. Views of it must be unused."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self.pages
            try:
                self._map.close()
            except BufferError:  # a view still exists: the mapping ends with it
                del self._map
