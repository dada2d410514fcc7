"""Progress bars."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from numba.core import event
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress(Protocol):
    """Reports progress up to 1, with an optional description."""

    def __call__(self, share: float, what: str = "") -> None: ...


@contextlib.contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """A transient progress bar on stderr."""
    console = Console(stderr=True)
    with Bar(console=console, transient=True) as bar, saying_that_it_compiles(console.print):
        task = bar.add_task(name, total=1.0)

        def move(share: float, what: str = "") -> None:
            bar.update(task, completed=share, description=f"{name}: {what}" if what else name)

        yield move


@contextlib.contextmanager
def stage_bar(name: str) -> Iterator[Callable[[str, float], None]]:
    """A progress bar with the current stage on stderr; without a terminal one line per stage."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    shown = ""
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=1.0)

        def move(what: str, share: float) -> None:
            nonlocal shown
            bar.update(task, description=f"{name}: {what}", completed=share)
            if what != shown and not console.is_terminal:
                print(f"{name}: {what}", file=sys.stderr, flush=True)
            shown = what

        move("starting", 0.0)
        yield move


@contextlib.contextmanager
def saying_that_it_compiles(say: Callable[[str], Any]) -> Iterator[None]:
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
            self._say("compiling the policies' hot loops: half a minute, once on this machine")
            self._say = None

    def on_end(self, event: Any) -> None:
        """Nothing to say."""
