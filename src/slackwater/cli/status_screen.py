"""The service on one screen: problems, models, workers, nodes, jobs and queues."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slackwater.cli.job_tables import iterations, stage_text

_OVER = ("finished", "stopped")
_JOBS_SHOWN, _MINUTES_SHOWN, _NAMES_SHOWN = 12, 5, 6


def status_screen(found: dict[str, Any]) -> RenderableType:
    """`found` is the operator's `/slackwater/status`, with the URL and the pid added."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, values in _rows(found):
        for place, value in enumerate(values):
            table.add_row("" if place else name, value)
    # Not wrapped, because they may contain a command to copy.
    problems = [
        Text(f"! {line}", style="red", no_wrap=True, overflow="ignore")
        for line in found.get("problems", [])
    ]
    parts: list[RenderableType] = [*problems, table]
    if live := [row for row in found.get("jobs", []) if row["stage"] not in _OVER]:
        parts.append(_jobs(live))
    return Group(*parts)


def _rows(found: dict[str, Any]) -> Iterable[tuple[str, Sequence[str]]]:
    gauges, instances = found["gauges"], found.get("instances", [])
    starting = found.get("starting", [])
    yield "service", [f"{found['url']}   pid {found['pid']}"]
    if starting:
        yield "starting", [format_names(starting)]
    yield (
        "models",
        [
            f"{name}   {_engines_of(name, instances)}   {directory}"
            for name, directory in found["models"].items()
        ],
    )
    trainers = found["workers"].get("trainer", [])
    if trainers:
        yield "trainers", [f"{len(trainers)}: {format_names(trainers)}"]
    if nodes := [_node(row) for row in found.get("nodes", [])]:
        yield "nodes", nodes
    yield "devices", [line for row in found.get("nodes", []) for line in _devices(row)]
    if gauges.get("sandboxes") or gauges.get("actions_waiting"):
        yield (
            "sandboxes",
            [
                f"{gauges['sandboxes']:.0f}: {gauges['actions_running']:.0f} actions run, "
                f"{gauges['actions_waiting']:.0f} wait, {gauges['environments']:.0f} environments"
            ],
        )
    yield from _serving(found.get("serving"))
    yield "jobs", [_counts(row["stage"] for row in found.get("jobs", [])) or "none"]
    turns = gauges["rollout_waiting_turns"]
    yield (
        "queues",
        [
            f"samples: {gauges['rollout_live_turns'] - turns:.0f} run, {turns:.0f} wait;   "
            f"training operations: {gauges['waiting_operations']:.0f} wait"
        ],
    )


def _engines_of(model: str, instances: list[dict[str, Any]]) -> str:
    counts = _counts(row["state"] for row in instances if row.get("model") == model)
    return f"engines: {counts}" if counts else "no engine"


def _counts(words: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items())


def _node(row: dict[str, Any]) -> str:
    if "host" not in row:
        return f"{row['node']}   away"
    memory = f"{row['memory_mb'] / 1024:.0f} GiB"
    return f"{row['node']}   {row['cores']} cores, {memory}, {len(row['workers'])} workers"


def _devices(row: dict[str, Any]) -> list[str]:
    """The owners of each device of a node that has several."""
    devices = row.get("devices", [])
    if len(devices) < 2:
        return []
    return [f"{each['device']}   {', '.join(each['owners']) or 'unused'}" for each in devices]


def format_names(names: Sequence[str]) -> str:
    """The first names, and the number of others."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _jobs(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("job", "stage", "iteration", "device s", "reason"):
        table.add_column(name, overflow="fold", no_wrap=name != "reason")
    for row in rows[:_JOBS_SHOWN]:
        name = row.get("name") or row["job"]
        used = f"{row['device_s']:.1f}"
        table.add_row(name, stage_text(row["stage"]), iterations(row), used, row["reason"])
    if len(rows) > _JOBS_SHOWN:
        table.caption = f"{len(rows) - _JOBS_SHOWN} more: `slackwater job list`"
    return table


def _serving(serving: dict[str, Any] | None) -> Iterable[tuple[str, Sequence[str]]]:
    """The served model's SLO, the loans of its devices, and the last minutes."""
    if serving is None:
        return
    slo = serving["slo"]
    target = f"TTFT {slo['ttft_s']:g} s, TPOT {slo['tpot_s']:g} s for {slo['share']:.0%}"
    yield "serves", [f"{serving['model']}   {target}"]
    yield "loans", [f"{worker}   to {job}" for worker, job in serving["lent"].items()] or ["none"]
    yield "not lent", [f"{worker}   {why}" for worker, why in serving["not_lent"].items()]
    for minute in serving["minutes"][-_MINUTES_SHOWN:]:
        line = (
            f"{minute['attainment']:.1%} of {minute['requests']:.0f} requests within the SLO,"
            f" p99 TTFT {minute['ttft_p99_s']:.3f} s, TPOT {minute['tpot_p99_s']:.3f} s"
        )
        yield f"minute {minute['minute']:.0f}", [line]
