"""`slackwater plan`: plans how jobs share a fleet, and what that saves."""

import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slackwater.cli.running_service import (
    AsJson,
    DryRun,
    Key,
    ServiceClient,
    Sets,
    State,
    Trace,
    Url,
    find_service,
)
from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from slackwater.sim.planning.sharing_plan import SharingPlan

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def plan(
    fleet: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Fleet file (TOML) with [rollout] and [train] pools."),
    ] = None,
    jobs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Job table (CSV) with one row per job.")
    ] = None,
    slacks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of --fleet and --jobs: a scenario with five kinds of slack.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="With --slacks: number of seeds.")] = 3,
    from_service: Annotated[
        bool,
        typer.Option(
            "--from-service",
            help="With --slacks: use the jobs and the last week of a running service.",
        ),
    ] = False,
    url: Url = None,
    key: Key = None,
    state: State = DEFAULT_STATE,
    sets: Sets = None,
    policy: Annotated[str, typer.Option(help="Placement policy.")] = "interleaving",
    dry_run: DryRun = False,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw some iterations: .png, .svg or .pdf.")
    ] = None,
    trace: Trace = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan as a file for `slackwater up --config`."),
    ] = None,
) -> None:
    """Plan which jobs share which nodes, their slowdowns and the savings.

    With --slacks, show what each kind of slack saves.
    """
    from slackwater.cli.atomic_file import check_place, unwind_on_terminate, write_atomically
    from slackwater.cli.progress import progress_bar
    from slackwater.cli.scenario_source import (
        check_policy,
        plot_format,
        settings_text,
        write_pictures,
    )
    from slackwater.model.config import plain
    from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
    from slackwater.sim.inputs.scenario_file import read_fleet, read_jobs
    from slackwater.sim.planning.figures import plan_figures
    from slackwater.sim.planning.sharing_plan import plan_sharing

    unwind_on_terminate()
    if slacks is not None:
        from slackwater.cli.slack_plan import plan_slacks, refuse_fleet_and_jobs

        refuse_fleet_and_jobs(fleet, jobs)
        with tempfile.TemporaryDirectory(prefix="slackwater-plan-") as folder:
            measure = None
            if from_service:
                from slackwater.cli.measured_scenario import measure_tables

                service = ServiceClient(*find_service(url, key, state))
                measure = partial(measure_tables, service, folder=Path(folder))
            plan_slacks(
                slacks,
                sets or [],
                seeds=seeds,
                dry_run=dry_run,
                as_json=as_json,
                plot=plot,
                output=output,
                measure=measure,
            )
        return
    if from_service:
        raise ConfigError("--from-service: needs --slacks FILE, which has the pools and the prices")
    if fleet is None or jobs is None:
        raise ConfigError(
            "--fleet, --jobs: both are required, or --slacks FILE instead "
            "(examples: examples/plan, examples/five_slacks)"
        )
    entry = read_fleet(fleet, sets or [])
    specs = read_jobs(jobs)
    fmt = plot_format(plot)
    check_place(trace, "--trace")
    check_place(output, "--output")
    pools = entry.pools()
    if dry_run:
        print(settings_text({"fleet": plain(entry), "jobs": plain(specs)}, as_json))
        return
    scenario = ClusterScenario("plan", pools, specs, policy=PolicyConfig(name=policy))
    check_policy(scenario)
    with progress_bar("plan") as progress:
        measured = plan_sharing(scenario, progress, _say_first)
    write_pictures(measured.report, plot=plot, plot_format=fmt, trace=trace)
    figures = plan_figures(measured, scenario.view())
    if output is not None:
        order = [spec.job for spec in measured.plan.placed]
        memory_gb = min(pool.node_type.host_memory_gb for pool in pools)
        text = _service_file(figures, order, memory_gb, policy)
        write_atomically(output, text.encode(), "--output")
    if as_json:
        print(json.dumps(figures))
        return
    from slackwater.cli.run_tables import show

    show(_tables(figures))


def _service_file(
    figures: dict[str, Any], order: Sequence[str], memory_gb: float, policy: str
) -> str:
    """A service's configuration: the plan's policy on the nodes that the plan uses."""
    from slackwater.model.toml_text import toml_text

    used = {
        role: sorted(
            {node for group in figures["groups"] for node in group[f"{role}_nodes"]},
            key=lambda node: int(node.rpartition("-")[2]),
        )
        for role in ("rollout", "train")
    }
    service = {
        "coschedule": {"placement": policy, "host_memory_gb": memory_gb},
        "fleet": {
            "pools": [
                {"name": "rollout", "engines": 1},
                {"name": "train", "engines": 0, "trainers": 1},
            ],
            "nodes": [{"name": node, "pool": role} for role in used for node in used[role]],
        },
    }
    return f"# Submit the jobs in the plan's order: {', '.join(order)}\n{toml_text(service)}"


def _say_first(plan: "SharingPlan") -> None:
    """Print a first answer to stderr while the plan is still improved and measured."""
    waiting = len(plan.jobs) - len(plan.placed)
    without = f", {waiting} without nodes" if waiting else ""
    print(
        f"first answer: {len(plan.placed)} of {len(plan.jobs)} jobs placed{without}, "
        f"{plan.price_per_h:,.2f} $/h shared against {plan.alone_price_per_h:,.2f} $/h alone; "
        "now measuring slowdowns and trying other orders",
        file=sys.stderr,
        flush=True,
    )


def _tables(figures: dict[str, Any]) -> "RenderableType":
    from rich import box
    from rich.console import Group
    from rich.table import Table

    from slackwater.cli.run_tables import times

    table = Table(
        title="Who shares what", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("group", no_wrap=True)
    for name in ("rollout nodes", "train nodes", "$/h"):
        table.add_column(name, justify="right", max_width=7)
    for name in ("job", "by"):
        table.add_column(name, no_wrap=True)
    for name in ("alone", "shared", "slowdown", "SLO"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in figures["groups"]:
        counts = (str(len(group[key])) for key in ("rollout_nodes", "train_nodes"))
        lead = (group["group"], *counts, f"{group['price_per_h']:,.2f}")
        for job in group["jobs"]:
            table.add_row(
                *lead,
                job["job"],
                job["placed_by"],
                f"{job['solo_s']:.0f} s",
                f"{job['iteration_s']:.0f} s",
                times(job["slowdown"]),
                f"{job['slo']:.2f}",
                style=None if job["kept_slo"] else "red",
            )
            lead = ("", "", "", "")
        table.add_section()
    used = {job["placed_by"] for group in figures["groups"] for job in group["jobs"]}
    table.caption = "by: " + "; ".join(f"{name}, {_BY[name]}" for name in _BY if name in used)
    table.caption_justify = "left"
    return Group(table, *_summary(figures))


_BY = {
    "pack": "on nodes that another job pays for already",
    "scale": "shares train nodes and adds rollout nodes",
    "isolate": "nodes of its own",
    "colocate": "all phases on its train nodes",
}


def _summary(figures: dict[str, Any]) -> list[str]:
    """Counts of placed jobs, their savings, and why others were not placed."""
    from slackwater.cli.run_tables import share, times

    refusals = figures["refusals"]
    refused = sum(row["for_good"] for row in refusals)
    counts = ((refused, "refused"), (len(refusals) - refused, "must wait"))
    turned_away = ", ".join(f"{count} {what}" for count, what in counts if count)
    placed = f"{figures['placed']} of {figures['jobs']} jobs placed"
    saved = (
        f"alone {figures['alone_price_per_h']:,.2f} $/h, shared {figures['price_per_h']:,.2f} $/h: "
        f"saves {figures['saved_per_h']:,.2f} $/h, {times(figures['times_cheaper'])} cheaper, "
        f"{times(figures['work_per_dollar'])} the iterations per dollar"
    )
    of_them = f"the {figures['placed']} placed jobs " if refusals else ""
    return [
        f"{placed}{f', {turned_away}' if turned_away else ''};"
        f" SLO kept by {share(figures['slo_attainment'])} of those placed",
        f"{of_them}{saved}{'; the others count on neither side' if refusals else ''}",
        *(
            f"{'refused' if row['for_good'] else 'must wait'}: {row['job']}: {row['reason']}"
            for row in refusals
        ),
    ]
