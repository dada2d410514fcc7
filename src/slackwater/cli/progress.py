"""Progress bars."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from numba.core import event
from rich.console import Console
from rich.progress import Progress as Bar


class Progress(Protocol):
    """Reports progress up to 1, with an optional description."""

    def __call__(self, share: float, what: str = "") -> None: ...


@contextlib.contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    console = Console(stderr=True)
    with Bar(console=console, transient=True) as bar, announce_compilation(console.print):
        task = bar.add_task(name, total=1.0)

        def move(share: float, what: str = "") -> None:
            bar.update(task, completed=share, description=f"{name}: {what}" if what else name)

        yield move


@contextlib.contextmanager
def announce_compilation(say: Callable[[str], Any]) -> Iterator[None]:
    """Announce that the first run on a machine compiles the policies' hot loops."""
    listening: Callable[[str, event.Listener], AbstractContextManager[None]] = (
        event.install_listener
    )
    with listening("numba:compile", _FirstCompilation(say)):
        yield


class _FirstCompilation(event.Listener):
    def __init__(self, say: Callable[[str], Any]) -> None:
        self._say: Callable[[str], Any] | None = say

    def on_start(self, event: Any) -> None:
        if self._say is not None:
            self._say(
                "compiling the policies' hot loops: about half a minute, once on this machine"
            )
            self._say = None

    def on_end(self, event: Any) -> None:
        """Required by the base class."""
