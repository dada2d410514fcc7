"""`docs/results/coscheduling.md` from the benches' figures: the papers' figures beside ours, with
scenario and command.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.coscheduling.results_sections import SECTIONS, Row, Section

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one bench printed, and how it was called. Of several seeds `figures` are means, and
    `spread` has the least and the most.
    """

    figures: Figures
    commit: str
    machine: Mapping[str, Any]
    command: str
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seeds: str = ""


@dataclass(frozen=True, slots=True)
class MuxResult:
    """One micro-benchmark of WEAVE 6.2: work per dollar over solo, and each policy's mean
    slowdown.
    """

    scenario: str
    title: str
    paper: str
    work_per_dollar: Mapping[str, float]
    slowdown: Mapping[str, float]
    slo_attainment: Mapping[str, float]


def results_page(benches: Mapping[str, Measured], muxes: list[MuxResult]) -> str:
    """The whole page. A bench that was not run is said to be missing."""
    parts = [
        "# Results: co-scheduling beside the papers' figures\n",
        "What does co-scheduling cost and save against the policies of WEAVE and PlexRL, beside the "
        "figures that these papers report? Written by `slackwater sim results`. `ours` is the "
        "policy `interleaving`.\n",
        "Inputs (phase lengths, prices, memory, arrivals, SLOs) are those that the papers publish. "
        "Where they publish none, ours are marked in `sim/cluster/generate.py` and in the comments "
        "of `scenarios/*.toml`. No scenario was tuned towards a result. A bar is what this project "
        "asked of itself before it measured. The papers measured on other machines and traces, so "
        "compare policies within one scenario. A figure of several seeds is their mean, with the "
        "least and the most in brackets; its bar is met if every seed meets it.\n",
    ]
    parts.append(_summary(benches))
    parts += [_section(section, benches.get(section.bench)) for section in SECTIONS]
    if muxes:
        parts.append(_mux_section(muxes))
    return "\n".join(parts)


def _summary(benches: Mapping[str, Measured]) -> str:
    """Every row with a bar, of the benches that were run."""
    lines = [
        "## Where we stand\n",
        "All rows that have a bar; every cell of Figure 15 has its own in that section. The "
        "sections also have the rows without a bar and the machines.\n",
        "| experiment | question | papers | here | bar | | command, commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for section in SECTIONS:
        measured = benches.get(section.bench)
        if measured is None:
            continue
        for row in section.rows:
            shown, bar, verdict = _judge(row, measured)
            if bar:
                source = f"`{measured.command}`, {measured.commit}"
                cells = (section.title, row.what, row.paper or "-", shown, bar, verdict, source)
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _section(section: Section, measured: Measured | None) -> str:
    lines = [f"## {section.title}\n", f"Scenario: {section.scenario}.\n"]
    if measured is None:
        return "\n".join(
            [*lines, f"Not measured; run `slackwater bench {section.bench} --json`.\n"]
        )
    on = _machine(measured.machine)
    seeds = f"seeds {measured.seeds}; " if measured.seeds else ""
    lines.append(f"Command: `{measured.command}` ({seeds}commit {measured.commit}; {on}).\n")
    lines += ["| what | papers | here | bar | |", "|---|---|---|---|---|"]
    lines += [_row(row, measured) for row in section.rows]
    lines.append("")
    if section.cells:
        lines += _cells(section.cells, measured)
    if section.note:
        lines.append(f"{section.note}\n")
    return "\n".join(lines)


def _machine(machine: Mapping[str, Any]) -> str:
    named = {"cores": "{} cores", "python": "Python {}"}
    return ", ".join(named.get(key, "{}").format(value) for key, value in machine.items())


def _row(row: Row, measured: Measured) -> str:
    shown, bar, verdict = _judge(row, measured)
    return f"| {row.what} | {row.paper or '-'} | {shown} | {bar} | {verdict} |"


def _judge(row: Row, measured: Measured) -> tuple[str, str, str]:
    """The figure, its bar and the verdict, as the tables show them."""
    figures = measured.figures
    at_most = figures.get(row.at_most_key, row.at_most) if row.at_most_key else row.at_most
    bar = f"<= {at_most:.3g}" if at_most is not None else ""
    bar = f">= {row.at_least:g}" if row.at_least is not None else bar
    if row.key not in figures:
        return "not measured", bar, ""
    value = float(figures[row.key])
    low, high = measured.spread.get(row.key, (value, value))
    met = (at_most is None or high <= at_most) and (row.at_least is None or low >= row.at_least)
    verdict = ("met" if met else "**missed**") if bar else ""
    return _spread(value, low, high, row.digits), bar, verdict


def _spread(value: float, low: float, high: float, digits: int) -> str:
    """A mean with its least and most, where they differ as shown."""
    least, most = _number(low, digits), _number(high, digits)
    mean = _number(value, digits)
    return mean if least == most else f"{mean} ({least} to {most})"


_OF_A_CELL = (
    "ours_over_group",
    "ours_over_regrouping_keeping",
    "ours.slo_attainment",
    "group.slo_attainment",
    "ours.iterations_in_bound",
    "group.iterations_in_bound",
    "ours.mean_slowdown",
    "group.mean_slowdown",
)


def _cells(cells: Mapping[str, str], measured: Measured) -> list[str]:
    lines = [
        "| cell | cost of ours over group (static) | over hourly regrouping that keeps "
        "SLOs | SLO kept: ours, group | iterations within the bound: ours, group "
        "| mean slowdown: ours, group | |",
        "|---|---|---|---|---|---|---|",
    ]
    for prefix, words in cells.items():
        keys = [f"{prefix}.{key}" for key in _OF_A_CELL]
        if all(key in measured.figures for key in keys):
            values = [float(measured.figures[key]) for key in keys]
            spreads = [
                measured.spread.get(key, (value, value))
                for key, value in zip(keys, values, strict=True)
            ]
            shown = [
                _spread(value, low, high, 3)
                for value, (low, high) in zip(values, spreads, strict=True)
            ]
            kept = spreads[2][0] == 1 and spreads[3][0] == 1
            most = max(spreads[0][1], spreads[1][1])
            met = "met" if most <= 1 and kept else "**missed**"
            pairs = [", ".join(shown[at : at + 2]) for at in (2, 4, 6)]
            lines.append(f"| {words} | {shown[0]} | {shown[1]} | {' | '.join(pairs)} | {met} |")
    return [
        *lines,
        "",
        "Bar in every cell: at most 1 against static grouping and against hourly regrouping at SLO "
        "1.0, for every seed.\n",
    ]


def _mux_section(muxes: list[MuxResult]) -> str:
    policies = list(muxes[0].work_per_dollar)
    lines = [
        "## Micro-benchmarks (WEAVE 6.2, Table 4)\n",
        "Work per dollar against solo-disaggregated (the same iterations, so the ratio of "
        "costs), then mean slowdown and SLO kept. "
        "Command: `slackwater sim compare NAME`.\n",
        f"| scenario | papers | {' | '.join(policies)} |",
        "|---" * (2 + len(policies)) + "|",
    ]
    for mux in muxes:
        shown = (
            f"{mux.work_per_dollar[p]:.2f}x ({mux.slowdown[p]:.2f}x, {mux.slo_attainment[p]:.0%})"
            for p in policies
        )
        lines.append(f"| `{mux.scenario}`: {mux.title} | {mux.paper} | {' | '.join(shown)} |")
    return "\n".join([*lines, ""])


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if digits == 0 or abs(value) < 1000 else f"{value:,.0f}"
