"""Jobs as tables in a terminal."""

import time
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

_STYLES = {
    "running": "green",
    "placed": "green",
    "profiling": "yellow",
    "held": "yellow",
    "failed": "red",
    "refused": "red",
}


def stage_text(stage: str) -> Text:
    return Text(stage, style=_STYLES.get(stage, ""))


def iterations(row: dict[str, Any]) -> str:
    """A job's progress, if known; a recipe reports its own, in which warm-up does not count."""
    done = row.get("iteration") or (0 if row.get("recipe") else row.get("iterations_done", 0))
    total = row.get("iterations")
    return f"{done}/{total}" if total else (str(done) if done else "")


def number(value: Any, digits: int) -> str:
    """A rounded number; empty if there is none."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) else ""


def mean_wait(row: dict[str, Any]) -> str:
    """The mean wait of a job's samples and training operations, in seconds."""
    count = row["turns"] + row["operations"]
    waited_s = row["turns_waited_s"] + row["operations_waited_s"]
    return f"{waited_s / count:.2f}" if count else ""


def job_list(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("job", "stage", "iteration", "reward", "slo"):
        table.add_column(name, no_wrap=name != "job", overflow="fold")
    for name in ("device s", "tokens", "ops", "mean wait s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.get("name") or row["job"],
            stage_text(row["stage"]),
            iterations(row),
            number(row.get("reward"), 3),
            number(row.get("slo"), 2),
            f"{row['device_s']:.1f}",
            f"{row['tokens']:,}",
            f"{row['operations']:,}",
            mean_wait(row),
        )
    return table


_FACTS = (
    *("job", "stage", "reason", "model", "recipe", "slo", "priority", "duty_ratio", "crashes"),
    *("engine_s", "trainer_s", "tokens", "turns", "failed_turns", "operations"),
    *("run", "env"),
)
_WAITS = (
    ("sample", "turns", "turns_waited_s"),
    ("training operation", "operations", "operations_waited_s"),
)


def job_facts(found: dict[str, Any]) -> Table:
    """One line per known fact."""
    table = Table(box=box.SIMPLE, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in _FACTS:
        value = found.get(name)
        if value not in (None, "", []):
            table.add_row(name.replace("_", " "), _plain(value))
    for what, count, waited in _WAITS:
        if found.get(count):
            mean_s = found[waited] / found[count]
            table.add_row("waited", f"{mean_s:.2f} s a {what} on average, over {found[count]:,}")
    if made := iterations(found):
        table.add_row("iterations", made)
    if found.get("reward") is not None:
        table.add_row("reward", number(found["reward"], 3))
    if found.get("submitted_s"):
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["submitted_s"]))
        table.add_row("submitted", at)
    driver = found.get("driver")
    if driver is not None:
        pid = f", pid {driver['pid']}" if driver["pid"] else ""
        table.add_row("driver", f"{driver['stage']}, attempt {driver['attempt']}{pid}")
    return table


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
