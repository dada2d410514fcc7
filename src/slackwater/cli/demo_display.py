"""Progress of `slackwater demo`: a bar per job, or occasional lines without a terminal."""

import time
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

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
        self._line_s = 0.0

    def __enter__(self) -> "DemoDisplay":
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def print_line(self, what: str) -> None:
        at_s = time.monotonic() - self._began_s
        self._console.print(f"{at_s:5.0f} s  {what}", highlight=False)

    def show(self, rows: Sequence[dict[str, Any]]) -> None:
        if not self._console.is_terminal:
            self._print_progress_line(rows)
            return
        for row in rows:
            name = row["name"]
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(
                    name, total=row["iterations"], reward="", stage=""
                )
            self._bars.update(
                self._tasks[name],
                completed=row.get("iteration") or 0,
                reward=number(row.get("reward"), 3),
                stage=row["stage"],
            )

    def _print_progress_line(self, rows: Sequence[dict[str, Any]]) -> None:
        if time.monotonic() - self._line_s < _LINE_S:
            return
        self._line_s = time.monotonic()
        parts = [f"{r['name']} {iterations(r)} {number(r.get('reward'), 3)}".strip() for r in rows]
        self.print_line(", ".join(parts))


_MEANINGS = (
    "slowdown: mean time of a shared iteration over that of one alone, without stalls, by this "
    "command's clock; "
    "bound: the slowdown that the job's SLO allows; waits: for a node that another job holds; "
    "hand-over: the job's own code, messages and weight transfers; switch: a node changes from "
    "one job to another"
)


def demo_table(result: dict[str, Any]) -> RenderableType:
    """All tables and totals of a demo."""
    parts: list[RenderableType] = [_jobs(result["jobs"]), *_times(result["jobs"])]
    parts.append(_pools(result["pools"]))
    took_s, alone_s = result["took_s"], result["alone_s"]
    lines = [
        f"after every job's first iteration: together {took_s:.0f} s on one fleet; the same "
        f"iterations one job after the other {alone_s:.0f} s ({alone_s / took_s:.2f}x), or at once "
        f"on {len(result['jobs'])} fleets"
    ]
    visit = result["instance"]
    if visit["came"]:
        lines.append(f"instance {visit['came']} joined and was killed; the jobs continued")
    permits = result["permits"]
    lines += [
        f"{permits['given']} permits, {permits['switches']} switches, "
        f"p99 {permits['p99_ms']:.1f} ms a permit",
        _MEANINGS,
        f"timeline {result['timeline']} opens in ui.perfetto.dev",
    ]
    return Group(*parts, *(Text(line) for line in lines))


def _jobs(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("job")
    for name in ("iterations", "reward", "s alone", "s shared", "slowdown", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        is_within_bound = row["slowdown"] <= row["bound"]
        table.add_row(
            row["job"],
            str(row["iterations"]),
            f"{row['reward_first']:.3f} → {row['reward_last']:.3f}",
            f"{row['alone_s']:.2f}",
            f"{row['shared_s']:.2f}",
            Text(f"{row['slowdown']:.2f}", "green" if is_within_bound else "red"),
            f"{row['bound']:.2f}",
        )
    return table


def _times(rows: list[dict[str, Any]]) -> list[Table]:
    """The split of the jobs' time; empty if they made too few iterations."""
    split = [(row["job"], when, row["time"][when]) for row in rows for when in ("alone", "shared")]
    split = [row for row in split if row[2] is not None]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("where the time went", no_wrap=True)
    for name in ("rollout", "train", "waits", "hand-over"):
        table.add_column(name, justify="right")
    for job, when, parts in split:
        table.add_row(f"{job}, {when}", *(f"{part:.0%}" for part in parts.values()))
    return [table] if split else []


def _pools(pools: dict[str, dict[str, float]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("pool", "used together", "used by one alone"):
        table.add_column(name, justify="left" if name == "pool" else "right")
    for name, pool in pools.items():
        table.add_row(name, f"{pool['used_together']:.0%}", f"{pool['used_alone']:.0%}")
    return table
