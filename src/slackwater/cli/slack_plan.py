"""`slackwater plan --slacks FILE`: what each kind of slack saves on a fleet."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slackwater.model.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from slackwater.sim.slacks.scenario import SlackScenario

_BAR = 16


def plan_slacks(
    file: Path,
    sets: list[str],
    *,
    seeds: int,
    dry_run: bool,
    as_json: bool,
    plot: Path | None,
    output: Path | None,
    measure: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Print a first answer to stderr, then the result of all combinations over the seeds.

    `measure` replaces tables of the file by what a service measured.
    """
    from slackwater.cli.atomic_file import check_place, write_atomically
    from slackwater.cli.progress import progress_bar
    from slackwater.cli.run_tables import show
    from slackwater.cli.scenario_source import plot_format, settings_text
    from slackwater.model.config import plain
    from slackwater.sim.slacks.contributions import SlackStudy, study_in_steps
    from slackwater.sim.slacks.scenario import read_slack_scenario

    scenario = read_slack_scenario(file, sets, measure)
    fmt = plot_format(plot)
    check_place(output, "--output")
    if dry_run:
        read = {key: value for key, value in plain(scenario).items() if key != "folder"}
        print(settings_text(read, as_json))
        return
    study = SlackStudy(scenario)
    with progress_bar("plan") as progress:
        steps = study_in_steps(study, seeds, lambda share: progress(share, "all combinations"))
        print(f"first answer: {_first_answer(next(steps))}", file=sys.stderr, flush=True)
        *_, figures = steps
    if plot is not None:
        from slackwater.timeline.plot import contribution_image

        write_atomically(plot, contribution_image(figures["kinds"], fmt), "--plot")
    if output is not None:
        text = _service_file(scenario, study.nodes_used(), figures)
        write_atomically(output, text.encode(), "--output")
    if as_json:
        print(json.dumps(figures))
    else:
        show(_tables(figures))


def refuse_fleet_and_jobs(fleet: Path | None, jobs: Path | None) -> None:
    """Refuse --fleet and --jobs beside --slacks."""
    given = "--fleet" if fleet is not None else "--jobs" if jobs is not None else ""
    if given:
        fix = "excludes --slacks, whose file has the fleet and the jobs; leave one out"
        raise ConfigError.of(given, str(fleet or jobs), fix)


def _first_answer(figures: dict[str, Any]) -> str:
    none, whole = figures["none"], figures["all"]
    saved = {kind: -row["cost"]["mean"] for kind, row in figures["kinds"].items()}
    by_kind = ", ".join(f"{kind} {value:+.2f}" for kind, value in saved.items())
    return (
        f"{none['cost']:.2f} $ and {none['completed_s']:.0f} s without slack, "
        f"{whole['cost']:.2f} $ and {whole['completed_s']:.0f} s with all five; "
        f"$ saved by kind: {by_kind}"
    )


def _tables(figures: dict[str, Any]) -> "RenderableType":
    from rich import box
    from rich.console import Group
    from rich.table import Table

    table = Table(
        title="What each kind of slack saves",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("kind", no_wrap=True)
    table.add_column("$ saved", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("s saved", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("$ beside the others", "jobs in SLO", "served in SLO"):
        table.add_column(name, justify="right", max_width=10)
    rows = figures["kinds"]
    most = {
        name: max(*(abs(row[name]["mean"]) for row in rows.values()), 1e-9)
        for name in ("cost", "completed_s")
    }
    for kind, row in rows.items():
        table.add_row(
            kind,
            _spread(row["cost"], 2),
            _bar(-row["cost"]["mean"] / most["cost"]),
            _spread(row["completed_s"], 0),
            _bar(-row["completed_s"]["mean"] / most["completed_s"]),
            f"{-row['cost']['beside_others']:+.2f}",
            *(f"{100 * row[name]['mean']:+.1f}" for name in ("jobs_in_slo", "attainment")),
        )
    none, whole = figures["none"], figures["all"]
    tokens = ", ".join(f"{name} {count:,.0f}" for name, count in figures["rollout_tokens"].items())
    lines = [
        f"{name}: {row['cost']:.2f} $, {row['completed_s']:.0f} s, "
        f"{row['jobs_in_slo']:.0%} of the jobs and {row['attainment']:.1%} of the served requests "
        "in their SLO"
        for name, row in (("no slack", none), ("all five", whole))
    ]
    meaning = (
        f"means of {figures['seeds']} seeds (least to most) over {figures['combinations']} "
        "combinations; the kinds add up to the difference. Beside the others: the loss if only "
        "that kind is off. SLO columns: percentage points"
    )
    return Group(table, *lines, f"rollout tokens with all five: {tokens}", meaning)


def _spread(row: dict[str, float], digits: int) -> str:
    """A saving: a lower value with the kind on is positive."""
    mean, low, high = (-row[name] for name in ("mean", "most", "least"))
    return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def _bar(share: float) -> str:
    return ("█" if share >= 0 else "░") * round(abs(share) * _BAR)


def _service_file(scenario: "SlackScenario", nodes: list[str], figures: dict[str, Any]) -> str:
    """A service's configuration: the nodes that the jobs use, and the kinds that save."""
    from slackwater.model.node import Role
    from slackwater.model.toml_text import toml_text

    pools = {role: entry.pool(role).node_type for role, entry in scenario.pools().items()}
    saves = {kind for kind, row in figures["kinds"].items() if row["cost"]["beside_others"] < 0}
    service: dict[str, Any] = {
        "fleet": {
            "pools": [
                {"name": "rollout", "engines": 1, "price_per_h": pools[Role.ROLLOUT].price_per_h},
                {
                    **{"name": "train", "engines": 1, "trainers": 1, "sandboxes": 1},
                    "price_per_h": pools[Role.TRAIN].price_per_h,
                },
            ],
            "nodes": [{"name": node, "pool": node.partition("-")[0]} for node in nodes],
        },
        "prices": {
            "device_per_h": pools[Role.ROLLOUT].device_price_per_h,
            "spot_device_per_h": scenario.spot.device_price_per_h,
            "core_per_h": scenario.external.core_price_per_h,
        },
    }
    if "phases" in saves:
        memory_gb = min(kind.host_memory_gb for kind in pools.values())
        service["coschedule"] = {"placement": scenario.policy, "host_memory_gb": memory_gb}
    options = "--model policy=DIRECTORY"
    if "serving" in saves:
        slo = f"ttft={scenario.serving.ttft_s:g},tpot={scenario.serving.tpot_s:g}"
        options += f" --serve chat=DIRECTORY --slo {slo} --lend"
    return f"# slackwater up --config THIS_FILE {options}\n{toml_text(service)}"
