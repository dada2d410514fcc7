"""Tables of jobs and pools, compared with running alone."""

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def demo_table(result: dict[str, Any]) -> RenderableType:
    """All of it."""
    parts: list[RenderableType] = [_jobs(result["jobs"]), _pools(result["pools"])]
    took_s, alone_s = result["took_s"], result["alone_s"]
    lines = [
        f"together {took_s:.0f} s on one fleet; the same jobs one after the other, alone, "
        f"{alone_s:.0f} s ({alone_s / took_s:.2f}x), or at once on {len(result['jobs'])} fleets",
    ]
    guest = result["instance"]
    if guest["came"]:
        lines.append(f"instance {guest['came']} came and was killed; both jobs went on")
    if result["permits"] is not None:
        permits = result["permits"]
        lines.append(
            f"{permits['given']} permits, {permits['switches']} switches, "
            f"p99 {permits['p99_ms']:.1f} ms a permit"
        )
    if result["timeline"]:
        lines.append(f"timeline {result['timeline']} opens in ui.perfetto.dev")
    return Group(*parts, *(Text(line) for line in lines))


def _jobs(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("job")
    for name in ("iterations", "reward", "s alone", "s shared", "slowdown", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        slow = Text("-")
        if row["slowdown"] is not None:
            kept = row["slowdown"] <= row["bound"]
            slow = Text(f"{row['slowdown']:.2f}", "green" if kept else "red")
        table.add_row(
            row["job"],
            str(row["iterations"]),
            f"{row['reward_first']:.3f} → {row['reward_last']:.3f}",
            f"{row['alone_s']:.2f}",
            f"{row['shared_s']:.2f}",
            slow,
            f"{row['bound']:.2f}",
        )
    return table


def _pools(pools: dict[str, dict[str, float]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("pool", "used together", "used by one alone"):
        table.add_column(name, justify="left" if name == "pool" else "right")
    for name, pool in pools.items():
        table.add_row(name, f"{pool['used_together']:.0%}", f"{pool['used_alone']:.0%}")
    return table
