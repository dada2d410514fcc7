"""The progress of a benchmark."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


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
