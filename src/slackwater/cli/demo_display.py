"""Progress of `slackwater demo`: a bar per job, or occasional lines without a terminal."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from slackwater.cli.job_tables import iterations, number

_LINE_S = 5.0


class DemoDisplay:
    """`quiet` shows nothing at all."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(quiet=quiet)
        self._bars = Progress(
            TextColumn("{task.description:14}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]:6} {task.fields[stage]}"),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._began_s = time.monotonic()
        self._said_s = 0.0

    def __enter__(self) -> "DemoDisplay":
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def say(self, what: str) -> None:
        at_s = time.monotonic() - self._began_s
        self._console.print(f"{at_s:5.0f} s  {what}", highlight=False)

    def show(self, rows: Sequence[dict[str, Any]]) -> None:
        """How far the jobs are."""
        if not self._console.is_terminal:
            self._line(rows)
            return
        for row in rows:
            name = row["name"]
            if name not in self._tasks:
                fields = {"reward": "", "stage": ""}
                self._tasks[name] = self._bars.add_task(name, total=row["iterations"], **fields)  # type: ignore[arg-type]  # rich's fields are any
            self._bars.update(
                self._tasks[name],
                completed=row.get("iteration") or 0,
                reward=number(row.get("reward"), 3),
                stage=row["stage"],
            )

    def _line(self, rows: Sequence[dict[str, Any]]) -> None:
        if time.monotonic() - self._said_s < _LINE_S:
            return
        self._said_s = time.monotonic()
        said = [f"{r['name']} {iterations(r)} {number(r.get('reward'), 3)}".strip() for r in rows]
        self.say(", ".join(said))
