"""`docs/results/coscheduling.md` from the benches' figures: the papers' figures beside ours, with
scenario and command.
"""

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.coscheduling.results_sections import INTERLEAVING, SECTIONS, Row, Section

Figures = Mapping[str, Any]

_MISSED = "**missed**"
_LIMITS = """## Limits

- All figures but processor times are simulated. [Live sharing](coexecution.md) has live ones.
- `interleaving` bounds a job's life, `group` each iteration, and part of the saving comes from
  that. [Placement](placement.md#limits) has this and other limits, and further traces.

[Rules that were tried](../decisions/0007-rules-that-were-tried.md#placement) lists what was not
taken.
"""
# What the table of cells shows, after a cell's prefix; the first four have bars.
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
        _fill(
            "What does co-scheduling cost and save against the policies of WEAVE and PlexRL, beside "
            f"the figures that these papers report? {_count_bars(benches)} `slackwater sim results` "
            "writes this page from simulations."
        ),
        _fill(
            "- **Inputs** (phase lengths, prices, memory, arrivals, SLOs) are those that the papers "
            "publish. Where they publish none, ours are marked in `sim/cluster/generate.py` and in "
            "`scenarios/*.toml`. No scenario was tuned towards a result.\n"
            "- **Papers' figures** are from other machines and traces, so compare policies within "
            "one experiment.\n"
            "- **Several seeds**: a figure is their mean, with the least and the most in brackets. "
            "Its bar is met if every seed meets it."
        ),
        _summary(benches),
    ]
    parts += [_section(section, benches.get(section.bench)) for section in SECTIONS]
    if muxes:
        parts.append(_mux_section(muxes))
    parts.append(_LIMITS)
    return "\n".join(parts)


def _fill(text: str) -> str:
    """A paragraph or a list in lines of a page's width."""
    lines = []
    for line in text.split("\n"):
        indent = "  " if line.startswith("- ") else ""
        lines.append(
            textwrap.fill(
                line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        )
    return "\n".join([*lines, ""])


def _count_bars(benches: Mapping[str, Measured]) -> str:
    """How many bars are met, and which are not."""
    judged = [row for row in _judge_all(benches) if row[-1]]
    missed = [
        f"{section.label} ({what})" for section, what, *_, verdict in judged if verdict != "met"
    ]
    tail = f"; missed are {', '.join(missed)}" if missed else ""
    return f"{len(judged) - len(missed)} of {len(judged)} bars are met{tail}."


def _summary(benches: Mapping[str, Measured]) -> str:
    lines = [
        "## Where we stand\n",
        _fill(
            "Every figure that has a bar: what this project asked of itself before it measured. "
            "Each section has its command, commit and machine, and what was measured beside."
        ),
        "| experiment | question | papers | here | bar | |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| [{section.label}](#{_anchor(section.title)}) | {' | '.join(cells)} |"
        for section, *cells in _judge_all(benches)
    ]
    return "\n".join([*lines, ""])


def _judge_all(
    benches: Mapping[str, Measured],
) -> list[tuple[Section, str, str, str, str, str]]:
    """Section, question, papers, figure, bar and verdict of what has a bar, of benches that ran."""
    found = []
    for section in SECTIONS:
        measured = benches.get(section.bench)
        if measured is None:
            continue
        for row in section.rows:
            shown, bar, verdict = _judge(row, measured)
            if bar:
                what = f"{row.what}, {_quote(row.policy)}" if row.policy else row.what
                found.append((section, what, row.paper or "-", shown, bar, verdict))
        if section.cells:
            kept = [_meets_bar(prefix, measured) for prefix in _find_cells(section.cells, measured)]
            if kept:
                verdict = "met" if all(kept) else _MISSED
                of = f"{len(kept)} cells"
                what = "cells that meet their bars"
                found.append((section, what, "-", f"{sum(kept)} of {of}", f"all {of}", verdict))
    return found


def _anchor(title: str) -> str:
    """As GitHub names a heading."""
    return re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-")


def _section(section: Section, measured: Measured | None) -> str:
    lines = [f"## {section.title}\n", _fill(f"Scenario: {section.scenario}.")]
    if measured is None:
        return "\n".join(
            [*lines, f"Not measured; run `slackwater bench {section.bench} --json`.\n"]
        )
    on = _machine(measured.machine)
    seeds = f"seeds {measured.seeds}; " if measured.seeds else ""
    lines.append(_fill(f"Command: `{measured.command}` ({seeds}commit {measured.commit}; {on})."))
    if section.cells:
        lines += _cells(section.cells, measured)
    else:
        lines += _compare_policies([row for row in section.rows if row.policy], measured)
        lines += _list_others([row for row in section.rows if not row.policy], measured)
    if section.note:
        lines.append(_fill(section.note))
    return "\n".join(lines)


def _machine(machine: Mapping[str, Any]) -> str:
    named = {"cores": "{} cores", "python": "Python {}"}
    return ", ".join(named.get(key, "{}").format(value) for key, value in machine.items())


def _quote(policy: str) -> str:
    return f"`{'interleaving' if policy == INTERLEAVING else policy}`"


def _compare_policies(rows: list[Row], measured: Measured) -> list[str]:
    """Policies side by side; what the papers report comes last."""
    if not rows:
        return []
    policies = list(dict.fromkeys(row.policy for row in rows))
    named = " | ".join(_quote(policy) for policy in policies)
    lines = [f"| | {named} | papers |", "|---" * (2 + len(policies)) + "|"]
    for what in dict.fromkeys(row.what for row in rows):
        of = {row.policy: row for row in rows if row.what == what}
        cells = [_judge(of[policy], measured)[0] if policy in of else "" for policy in policies]
        papers = [
            row.paper if row.policy == INTERLEAVING else f"{_quote(row.policy)} {row.paper}"
            for row in of.values()
            if row.paper
        ]
        lines.append(f"| {what} | {' | '.join(cells)} | {', '.join(papers)} |")
    return [*lines, ""]


def _list_others(rows: list[Row], measured: Measured) -> list[str]:
    """What no single policy has and no bar, so that it is not in the first table."""
    shown = [(row, *_judge(row, measured)) for row in rows]
    lines = [f"| {row.what} | {figure} |" for row, figure, bar, _ in shown if not bar]
    return ["| also measured | figure |", "|---|---|", *lines, ""] if lines else []


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
    verdict = ("met" if met else _MISSED) if bar else ""
    return _spread(value, low, high, row.digits), bar, verdict


def _spread(value: float, low: float, high: float, digits: int) -> str:
    """A mean with its least and most, where they differ as shown."""
    least, most = _number(low, digits), _number(high, digits)
    mean = _number(value, digits)
    return mean if least == most else f"{mean} ({least} to {most})"


def _cells(cells: Mapping[str, str], measured: Measured) -> list[str]:
    """A row for each cell, with the pairs `interleaving`, `group`."""
    lines = [
        _fill(
            "Bar of a cell: both policies keep every SLO, and `interleaving` costs at most as much "
            "as `group` and as hourly regrouping that keeps SLOs, for every seed. In pairs: "
            "`interleaving`, `group`."
        ),
        "| cell | cost over `group` | over hourly regrouping | SLO kept | iterations within the "
        "bound | mean slowdown | |",
        "|---|---|---|---|---|---|---|",
    ]
    for prefix in _find_cells(cells, measured):
        keys = [f"{prefix}.{key}" for key in _OF_A_CELL]
        shown = [_judge(Row(key, ""), measured)[0] for key in keys]
        pairs = [", ".join(shown[at : at + 2]) for at in (2, 4, 6)]
        verdict = "met" if _meets_bar(prefix, measured) else _MISSED
        row = (cells[prefix], *shown[:2], *pairs, verdict)
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


def _find_cells(cells: Mapping[str, str], measured: Measured) -> list[str]:
    """The prefixes of cells whose figures are complete."""
    return [
        prefix
        for prefix in cells
        if all(f"{prefix}.{key}" in measured.figures for key in _OF_A_CELL)
    ]


def _meets_bar(prefix: str, measured: Measured) -> bool:
    """Whether a cell meets its bar with every seed."""
    over_group, over_regrouping, *kept = _OF_A_CELL[:4]
    rows = [Row(f"{prefix}.{key}", "", at_most=1.0) for key in (over_group, over_regrouping)]
    rows += [Row(f"{prefix}.{key}", "", at_least=1.0) for key in kept]
    return all(_judge(row, measured)[2] == "met" for row in rows)


def _mux_section(muxes: list[MuxResult]) -> str:
    policies = list(muxes[0].work_per_dollar)
    lines = [
        "## Micro-benchmarks (WEAVE 6.2, Table 4)\n",
        _fill(
            "Work per dollar over solo-disaggregated (the same iterations, so the ratio of costs); "
            "in brackets mean slowdown and SLO kept. Command: `slackwater sim compare NAME`."
        ),
        f"| scenario | papers | {' | '.join(_quote(policy) for policy in policies)} |",
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
