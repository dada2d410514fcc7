"""The live line of a training run: step, what it waits for, reward and its curve, time left."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slackwater.cli.text_plot import sparkline

_STALLED_S = 15.0
Problems = Callable[[], list[str]]


class TrainDisplay:
    """Called after each step; `stage` tells what the run waits for.

    Without a terminal it prints a line per stage before the first step, then a line now and then.
    """

    def __init__(self, console: Console, steps: int, begun: int, bar: Progress) -> None:
        self._console, self._steps, self._bar = console, steps, bar
        self._every = max(steps // 20, 1)
        self._rewards: list[float] = []
        self._task = bar.add_task("waiting for the service", total=steps, completed=begun)
        self.moved_s = time.monotonic()

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        self.moved_s = time.monotonic()
        self._rewards.append(metrics["reward"])
        self._bar.update(self._task, completed=step + 1, description=self._reward())
        if not self._console.is_terminal and (step + 1) % self._every == 0:
            line = f"step {step + 1}/{self._steps} {self._reward()}"
            self._console.print(line, highlight=False)

    def stage(self, what: str) -> None:
        """Something else is waited for."""
        self.moved_s = time.monotonic()
        if self._rewards:
            return
        self._bar.update(self._task, description=f"waiting for {what}")
        if not self._console.is_terminal:
            self._console.print(f"waiting for {what}", highlight=False)

    def tell(self, problem: str) -> None:
        """Why nothing moves, above the line."""
        self._console.print(f"the run waits: {problem}", style="red", highlight=False)

    def _reward(self) -> str:
        return f"reward {self._rewards[-1]:.3f} {sparkline(self._rewards)}"


@contextlib.contextmanager
def display(
    console: Console, steps: int, begun: int, problems: Problems | None = None
) -> Iterator[TrainDisplay]:
    """Yields what to call after each step. Asks `problems` when nothing has moved for a while."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    over = threading.Event()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = TrainDisplay(console, steps, begun, bar)
        if problems is not None:
            watching = (shown, problems, over)
            threading.Thread(target=watch_stalls, args=watching, daemon=True).start()
        try:
            yield shown
        finally:
            over.set()


def watch_stalls(
    shown: TrainDisplay,
    problems: Problems,
    over: threading.Event,
    stalled_s: float = _STALLED_S,
) -> None:
    """Say each problem of the service once for every time that the run stands still."""
    told: dict[str, float] = {}
    while not over.wait(min(stalled_s / 3, 5.0)):
        if time.monotonic() - shown.moved_s < stalled_s:
            continue
        for problem in problems():
            if told.get(problem) != shown.moved_s:
                told[problem] = shown.moved_s
                shown.tell(problem)
