"""The shape of every controller: `commands = controller.handle(event)`.

`event.now_s` is the only clock. The same events in the same order give the same commands,
whether they come from sockets (`runtime/`) or from an event queue in virtual time (`sim/`).
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class TimedEvent(Protocol):
    """Anything that happened at a moment."""

    @property
    def now_s(self) -> float: ...


E = TypeVar("E", bound=TimedEvent, contravariant=True)
C = TypeVar("C", covariant=True)


class Controller(Protocol[E, C]):
    """A state machine without I/O."""

    def handle(self, event: E) -> Sequence[C]:
        """Take one event; return what the runtime must do, in order."""


class CheckedController(Controller[E, C], Protocol[E, C]):
    """A controller whose invariants simulated runs check."""

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
