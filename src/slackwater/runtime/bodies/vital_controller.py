"""A controller without which nothing goes on: if it raises, its books may be wrong, so the service must stop."""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from slackwater.control.controller import Controller, Timed

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Timed)
C = TypeVar("C")


class VitalController(Generic[E, C]):
    """Passes events through; `died` is called when the controller raises, and the next start takes over from the log."""

    def __init__(self, inner: Controller[E, C], died: Callable[[], None]) -> None:
        self._inner = inner
        self._died = died

    def handle(self, event: E) -> Sequence[C]:
        try:
            return self._inner.handle(event)
        except Exception:
            logger.exception("a controller raised event=%s", type(event).__name__)
            self._died()
            raise

    def check_integrity(self) -> None:
        self._inner.check_integrity()
