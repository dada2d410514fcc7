"""How far an image has been read from disk, so that its copy to the device can follow."""

import threading
from collections.abc import Callable

from slackwater.model.errors import UnavailableError

_SILENT_S = 120.0  # a disk that gives nothing for so long has failed


class ImageArrivalProgress:
    """The first `reached` bytes are there and valid. `failed` says why the rest never comes."""

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
        """Be told what is so now, and then every change."""
        with self._changed:
            self._listeners.append(listener)
            listener(self.reached, self.failed)

    def wait(self, wanted: int) -> None:
        """Return when so many bytes are there; UnavailableError if they will not come."""
        with self._changed:
            while self.reached < wanted:
                # Being woken is no progress: a listener that joins is told where things stand.
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
