"""Simulation reports as tables."""

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from slackwater.sim.cluster.report import JobRow, RunReport
from slackwater.sim.cluster.summary import cost_baseline, mean_slowdown, ratio

_ROWS_SHOWN = 25


_PIPED_WIDTH = 110


def show(what: RenderableType) -> None:
    """Print a renderable; pipes and files get a fixed width."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    console.print(what)


def run_table(report: RunReport) -> RenderableType:
    """One run: its totals, then its first jobs."""
    heading = Table(
        title=f"{report.scenario}: policy {report.policy}, order {report.ordering}, seed "
        f"{report.seed}",
        show_header=False,
        title_justify="left",
        box=box.SIMPLE,
    )
    heading.add_row(
        "cost", f"{report.cost:,.0f} $ in {hours(report.end_s)} ({report.cost_per_h:,.2f} $/h)"
    )
    heading.add_row(
        "jobs", f"{report.finished} of {len(report.jobs)} finished, {len(report.refusals)} refused"
    )
    heading.add_row("SLO kept", f"{share(report.slo_attainment)} of placed jobs")
    heading.add_row("mean slowdown", times(mean_slowdown(report)))
    for name, use in (("rollout", report.rollout), ("train", report.train)):
        heading.add_row(
            f"{name} nodes",
            f"{use.rented_h:,.0f} node-hours, peak {use.peak_nodes}, "
            f"idle {share(use.bubble_share)}, switching "
            f"{share(use.switch_h / use.rented_h if use.rented_h else 0.0)}",
        )
    placed = ", ".join(f"{count} {name}" for name, count in report.admissions.items() if count)
    heading.add_row("placed by", placed or "nothing")
    heading.add_row(
        "events",
        f"{report.events:,}; {report.switches:,} switches, {report.moves} moves, "
        f"{report.tail_migrations:,} tails moved",
    )
    refusals = [f"refused {job}: {reason}" for job, reason in report.refusals[:_ROWS_SHOWN]]
    return Group(heading, _jobs_table(report.jobs), *refusals)


def comparison_table(reports: Sequence[RunReport]) -> RenderableType:
    """Policies side by side, the cheapest marked."""
    against = cost_baseline(reports)
    table = Table(
        title=f"{reports[0].scenario}: {len(reports[0].jobs)} jobs",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    both = any(r.slo_attainment_realised != r.slo_attainment for r in reports)
    refused = any(r.refusals for r in reports)
    table.add_column("policy", no_wrap=True)
    for name, shown in {
        "cost $": True,
        "$/h": True,
        f"x below {against.policy}": True,
        "SLO kept": True,
        "by real lengths": both,
        "slow- down": True,
        "idle rollout": True,
        "idle train": True,
        "done after": True,
        "refused": refused,
    }.items():
        if shown:
            table.add_column(name, justify="right", no_wrap=" " not in name, min_width=6)
    cheapest = min(
        (r for r in reports if r.slo_attainment == 1.0), key=lambda r: r.cost, default=None
    )
    for report in reports:
        table.add_row(
            report.policy,
            f"{report.cost:,.0f}",
            f"{report.cost_per_h:,.1f}",
            times(ratio(against, report)),
            share(report.slo_attainment),
            *([share(report.slo_attainment_realised)] if both else []),
            times(mean_slowdown(report)),
            share(report.rollout.bubble_share),
            share(report.train.bubble_share),
            hours(report.end_s),
            *([str(len(report.refusals))] if refused else []),
            style="bold green" if report is cheapest else None,
        )
    return table


def hours(seconds: float) -> str:
    """A duration in a readable unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 4 * 86400 else f"{seconds / 86400:.1f} days"


def share(value: float) -> str:
    """A share in percent; only exactly 1 prints as 100 %."""
    text = f"{100 * value:.1f}"
    return "99.9%" if text == "100.0" and value < 1 else f"{text}%"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _jobs_table(rows: Sequence[JobRow]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("job", no_wrap=True)
    for name in ("SLO", "slowdown", "kept", "waited", "ran", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("group", no_wrap=True)
    table.add_column("by", no_wrap=True)
    for row in rows[:_ROWS_SHOWN]:
        table.add_row(
            row.job,
            f"{row.slo:.2f}",
            times(row.slowdown_realised) if row.placed_s is not None else "-",
            "yes" if row.kept_slo else "[red]no[/red]",
            hours(row.queued_s),
            hours(row.elapsed_s),
            f"{row.iterations_done}/{row.iterations}",
            row.group or "-",
            row.strategy.value if row.strategy else "-",
        )
    if len(rows) > _ROWS_SHOWN:
        table.caption = f"{len(rows) - _ROWS_SHOWN} more jobs: --json prints all"
    return table
