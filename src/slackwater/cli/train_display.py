"""The live line of a training run: step, reward and its curve so far, time left."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slackwater.cli.text_plot import sparkline


@contextlib.contextmanager
def display(
    console: Console, steps: int, begun: int
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Yields what to call after each step. Without a terminal it prints a line now and then."""
    rewards: list[float] = []
    every = max(steps // 20, 1)
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=steps, completed=begun)

        def watch(step: int, metrics: dict[str, float]) -> None:
            rewards.append(metrics["reward"])
            line = f"reward {metrics['reward']:.3f} {sparkline(rewards)}"
            bar.update(task, completed=step + 1, description=line)
            if not console.is_terminal and (step + 1) % every == 0:
                console.print(f"step {step + 1}/{steps} {line}", highlight=False)

        yield watch
