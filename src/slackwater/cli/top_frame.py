"""One frame of `slackwater top`, fitted to the terminal's size."""

import time
from typing import Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slackwater.cli.job_tables import iterations, mean_wait, number, stage_text
from slackwater.cli.running_service import OVER

_NARROW, _WIDE = 70, 100
_BLOCKS = "▏▎▍▌▋▊▉█"


def draw(
    frame: dict[str, Any], width: int, height: int = 1000, *, everything: bool = False
) -> RenderableType:
    """One screen, the most important part first; hidden rows are counted at the end."""
    shared = frame["shared"]
    jobs = _jobs(frame, everything)
    parts: list[RenderableType] = [_headline(frame)]
    if shared is not None:
        parts += [_pools(shared, width), _nodes(shared, width)]
    else:
        parts.append(_plain_nodes(frame["nodes"]))
    used = sum(part.row_count + 3 if isinstance(part, Table) else 1 for part in parts)
    instances = frame["instances"]
    room = max(height - used - 6, 4)
    shown = jobs[: max(room - min(len(instances), room // 3), 2)]
    parts.append(_job_table(shown, width, shared is not None))
    left = max(room - len(shown), 1)
    parts.append(_instances(instances[:left], width))
    hidden = (len(jobs) - len(shown), len(instances) - len(instances[:left]))
    if any(hidden):
        parts.append(Text(f"not shown: {hidden[0]} jobs, {hidden[1]} instances", style="dim"))
    return Group(*parts)


def _headline(frame: dict[str, Any]) -> Text:
    gauges = frame["status"]["gauges"]
    waits = (
        f"turns {gauges['rollout_live_turns']:.0f} live, {gauges['rollout_waiting_turns']:.0f} "
        "waiting"
    )
    ops = f"operations {gauges['waiting_operations']:.0f} waiting"
    parts = [time.strftime("%H:%M:%S", time.localtime(frame["at_s"])), frame["url"], waits, ops]
    if "tokens_per_s" in frame:
        parts.append(f"{frame['tokens_per_s']:,.0f} tokens/s")
    return Text(" · ".join(parts), style="bold", overflow="ellipsis", no_wrap=True)


def bar(share: float, width: int) -> str:
    """A share from 0 to 1 as a bar of `width` cells."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_BLOCKS[rest - 1] if rest else "")).ljust(width, "·")


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        side: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=side, no_wrap=True, overflow="ellipsis")
    return table


def _pools(shared: dict[str, Any], width: int) -> Table:
    permits = shared["permits"]
    table = _table("pool", "nodes", "busy", "used", right=("nodes", "busy"))
    cells = max(min(width - 40, 30), 8)
    for name, pool in shared["pools"].items():
        use = f"{bar(pool['utilisation'], cells)} {pool['utilisation']:4.0%}"
        table.add_row(name, str(pool["nodes"]), str(pool["busy"]), use)
    table.caption = (
        f"{shared['placement']}, {shared['ordering']}: {permits['given']:,} permits, "
        f"{permits['switches']:,} switches, p99 {permits['p99_ms']:.1f} ms"
    )
    table.caption_justify = "left"
    return table


def _nodes(shared: dict[str, Any], width: int) -> Table:
    columns = ["node", "held by", "phase", "for s", "used"]
    if width >= _WIDE:
        columns += ["host", "tail of"]
    table = _table(*columns, right=("for s",))
    for row in shared["nodes"]:
        is_idle = row["job"] is None
        job = Text("idle", style="dim") if is_idle else Text(_short(row["job"]))
        cells = [row["node"], job, row["phase"] or "", number(row["since_s"], 1)]
        cells.append(f"{row['utilisation']:4.0%}")
        if width >= _WIDE:
            cells += [row["host"], _short(row["tail"] or "")]
        table.add_row(*cells)
    return table


def _plain_nodes(nodes: list[dict[str, Any]]) -> Table:
    """The nodes of a service without a co-scheduler."""
    table = _table("node", "pool", "workers", right=("workers",))
    for row in nodes:
        table.add_row(str(row["node"]), str(row.get("pool", "")), str(len(row["workers"])))
    return table


def _jobs(frame: dict[str, Any], everything: bool) -> list[dict[str, Any]]:
    """Rows of accounts merged with the co-scheduler's; jobs that are over come last."""
    shared = frame["shared"] or {"jobs": []}
    more = {row["job"]: row for row in shared["jobs"]}
    rows = [more.get(row["job"], {}) | row for row in frame["jobs"]]
    shown = [row for row in rows if everything or row["stage"] not in OVER]
    return sorted(shown, key=lambda row: row["stage"] in OVER)


def _job_table(rows: list[dict[str, Any]], width: int, shared: bool) -> Table:
    columns = ["job", "stage", "iter", "reward"]
    if shared:
        columns += ["slowdown"]
    if width >= _NARROW:
        columns += [*(["now"] if shared else []), "mean wait s"]
    if width >= _WIDE:
        columns += [*(["switches"] if shared else []), "device s", "tokens"]
    table = _table(*columns, right=("mean wait s", "switches", "device s", "tokens"))
    for row in rows:
        cells: dict[str, Any] = {
            "job": row.get("name") or _short(row["job"]),
            "stage": stage_text(row["stage"]),
            "iter": iterations(row),
            "reward": number(row.get("reward"), 3),
            "slowdown": _slowdown(row),
            "now": _now(row),
            "mean wait s": mean_wait(row),
            "switches": str(row.get("switches", "")),
            "device s": f"{row['device_s']:,.1f}",
            "tokens": f"{row['tokens']:,}",
        }
        table.add_row(*(cells[name] for name in columns))
    return table


def _slowdown(row: dict[str, Any]) -> Text:
    """Slowdown and bound; red if it is above the bound."""
    slow, bound = row.get("slowdown"), row.get("bound")
    if slow is None:
        return Text("" if bound is None else f"-/{bound:.2f}", style="dim")
    return Text(f"{slow:.2f}/{bound:.2f}", style="red" if slow > bound else "green")


def _now(row: dict[str, Any]) -> str:
    if row.get("phase"):
        return f"{row['phase']} {row['holds_s']:.1f} s"
    return f"waits {row['waits_s']:.1f} s" if row.get("waits_s") is not None else ""


def _instances(rows: list[dict[str, Any]], width: int) -> Table:
    columns = ["instance", "kind", "state", "running"]
    if width >= _NARROW:
        columns += ["pending", "tok/s"]
    if width >= _WIDE:
        columns += ["model"]
    table = _table(*columns, right=("running", "pending", "tok/s"))
    for row in rows:
        rate = row.get("tokens_per_s")
        cells = {
            **{name: str(row.get(name, "")) for name in (*columns, "model")},
            "tok/s": "" if rate is None else f"{rate:,.0f}",
        }
        table.add_row(*(cells[name] for name in columns))
    return table


def _short(job: str) -> str:
    """The job's name without its tenant."""
    tenant, slash, name = job.partition("/")
    return name if slash else tenant[:12]
