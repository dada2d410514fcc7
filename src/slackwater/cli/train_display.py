"""The live line of a training run: step, stage, reward or loss curve, time left."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_BLOCKS = " ▁▂▃▄▅▆▇█"
_STALLED_S = 15.0
Problems = Callable[[], list[str]]


def downsample(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: means of neighbours."""
    if len(values) <= width:
        return list(values)
    edges = [round(place * len(values) / width) for place in range(width + 1)]
    parts = [values[edges[i] : edges[i + 1]] for i in range(width)]
    return [sum(part) / len(part) for part in parts]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """One line; the lowest value is the lowest block."""
    shown = downsample(values, width)
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[1 + round((value - low) * scale)] for value in shown)


def plot(values: Sequence[float], title: str, width: int = 60, height: int = 8) -> str:
    """A filled curve of `height` lines from 0 (or the lowest value) to the highest."""
    shown = downsample(values, width)
    if not shown:
        return f"{title}: no points"
    low, high = min(0.0, *shown), max(shown)
    scale = height * 8 / (high - low) if high > low else 0.0
    lines = [title]
    for row in range(height - 1, -1, -1):
        cells = [min(max(round((value - low) * scale) - row * 8, 0), 8) for value in shown]
        label = high if row == height - 1 else low if row == 0 else None
        left = f"{label:8.3f}" if label is not None else " " * 8
        lines.append(f"{left} │{''.join(_BLOCKS[cell] for cell in cells)}")
    lines.append(f"{'':8} └{'─' * len(shown)} {len(values)} steps")
    return "\n".join(lines)


class TrainDisplay:
    """Shows progress: called after each step; `stage` names what the run waits for.

    Without a terminal it prints a line per stage before the first step, then about twenty lines.
    """

    def __init__(
        self, console: Console, steps: int, begun: int, bar: Progress, curve: str = "reward"
    ) -> None:
        self._console, self._steps, self._bar, self._curve = console, steps, bar, curve
        self._every = max(steps // 20, 1)
        self._values: list[float] = []
        self._task = bar.add_task("waiting for the service", total=steps, completed=begun)
        self.moved_s = time.monotonic()

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        self.moved_s = time.monotonic()
        self._values.append(metrics[self._curve])
        self._bar.update(self._task, completed=step + 1, description=self._progress())
        if not self._console.is_terminal and (step + 1) % self._every == 0:
            line = f"step {step + 1}/{self._steps} {self._progress()}"
            self._console.print(line, highlight=False)

    def stage(self, what: str) -> None:
        """Show what the run waits for now."""
        self.moved_s = time.monotonic()
        if self._values:
            return
        self._bar.update(self._task, description=f"waiting for {what}")
        if not self._console.is_terminal:
            self._console.print(f"waiting for {what}", highlight=False)

    def report(self, problem: str) -> None:
        """Print why the run stalls; not wrapped, because it may contain a command to copy."""
        self._console.print(
            f"the run waits: {problem}", style="red", highlight=False, soft_wrap=True
        )

    def _progress(self) -> str:
        return f"{self._curve} {self._values[-1]:.3f} {sparkline(self._values)}"


@contextlib.contextmanager
def display(
    console: Console,
    steps: int,
    begun: int,
    problems: Problems | None = None,
    curve: str = "reward",
) -> Iterator[TrainDisplay]:
    """Yields what to call after each step; asks `problems` when the run stalls."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    over = threading.Event()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = TrainDisplay(console, steps, begun, bar, curve)
        if problems is not None:
            watching = (shown, problems, over)
            threading.Thread(target=watch_stalls, args=watching, daemon=True).start()
        try:
            yield shown
        finally:
            over.set()


def watch_stalls(
    shown: TrainDisplay, problems: Problems, over: threading.Event, stalled_s: float = _STALLED_S
) -> None:
    """Print each problem of the service once per stall."""
    reported_s: dict[str, float] = {}
    while not over.wait(min(stalled_s / 3, 5.0)):
        if time.monotonic() - shown.moved_s < stalled_s:
            continue
        for problem in problems():
            if reported_s.get(problem) != shown.moved_s:
                reported_s[problem] = shown.moved_s
                shown.report(problem)
