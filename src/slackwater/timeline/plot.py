"""Plots of runs: phases per node with grey bubbles, and cost over time."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from slackwater.model.ids import JobId, NodeId
from slackwater.model.node import Role
from slackwater.model.placement import Phase
from slackwater.timeline.perfetto import node_order
from slackwater.timeline.spans import CostStep, Rental, Span, Timeline

Floats = NDArray[np.float64]

WHITE = (1.0, 1.0, 1.0)
_BUBBLE = "#d9d9d9"
_SWITCH = "#222222"
_INK = "#333333"
_LEGEND_JOBS = 14
_PIXELS = 1500
_SHORTEST_PIXELS = 3.0
# Twenty colours that stay apart for most eyes on a grey ground: ten hues, dark and light.
_COLOURS = tuple(
    f"#{value:06x}"
    for value in (
        0x1F6FB4, 0xE8751A, 0x2C9A4B, 0xC7353A, 0x8458B3, 0x8A5A44, 0xD45FA6, 0x6B7A00, 0x0F9BAE,
        0x3D4A8A,
        0x7DB7E8, 0xF9B872, 0x8FD19E, 0xF2918E, 0xBFA3DB, 0xC49C8B, 0xF0A9D2, 0xBBC655, 0x7FD3DD,
        0x9AA5DE,
    )
)  # fmt: skip


def node_strips(
    nodes: Sequence[NodeId],
    rentals: Sequence[Rental],
    spans: Sequence[Span],
    colours: Mapping[JobId, tuple[float, float, float]],
    idle: tuple[float, float, float],
    edges_s: Floats,
) -> Floats:
    """Red, green and blue (0 to 1) for every node and every stretch between two edges."""
    rented: dict[NodeId, list[Rental]] = {node: [] for node in nodes}
    ran: dict[NodeId, list[Span]] = {node: [] for node in nodes}
    tails: dict[NodeId, list[Span]] = {node: [] for node in nodes}
    for rental in rentals:
        rented[rental.node].append(rental)
    for span in spans:
        (tails if span.kind == "tail" else ran)[span.node].append(span)
    strips = np.empty((len(nodes), len(edges_s) - 1, 3))
    for row, node in enumerate(nodes):
        paid = _mean(rented[node], np.ones((len(rented[node]), 1)), edges_s)
        busy, busy_colour = _colour_spans(ran[node], colours, edges_s)
        tail, tail_colour = _colour_spans(tails[node], colours, edges_s)
        # A tail holds a few devices while the next job runs on the others; it shows where nothing
        # else does.
        free = np.clip(paid - busy, 0.0, 1.0)
        shown = np.minimum(tail, free)
        part = np.divide(shown, tail, out=np.zeros_like(tail), where=tail > 0)
        strips[row] = busy_colour + part * tail_colour
        strips[row] += (free - shown) * idle + (1 - np.maximum(paid, busy)) * WHITE
    return np.clip(strips, 0.0, 1.0)


def _colour_spans(
    spans: Sequence[Span], colours: Mapping[JobId, tuple[float, float, float]], edges_s: Floats
) -> tuple[Floats, Floats]:
    """Each interval's coverage by spans, and their weighted colours."""
    values = np.array([(1.0, *colours[span.job]) for span in spans]).reshape(-1, 4)
    mean = _mean(spans, values, edges_s)
    return mean[:, :1], mean[:, 1:]


def _mean(parts: Sequence[Span | Rental], values: Floats, edges_s: Floats) -> Floats:
    """The mean per interval of `values[i]` during `parts[i]`, 0 elsewhere; no overlaps."""
    if not parts:
        return np.zeros((len(edges_s) - 1, values.shape[1]))
    order = np.argsort([part.start_s for part in parts])
    starts_s = np.array([part.start_s for part in parts])[order]
    ends_s = np.maximum(np.array([part.end_s for part in parts])[order], starts_s)
    grown = np.cumsum(values[order] * (ends_s - starts_s)[:, None], axis=0)
    before = np.vstack([np.zeros((1, values.shape[1])), grown[:-1]])
    times_s = np.column_stack([starts_s, ends_s]).ravel()
    reached = np.stack([before, grown], axis=1).reshape(len(times_s), -1)
    at_edges = np.column_stack(
        [np.interp(edges_s, times_s, reached[:, column]) for column in range(reached.shape[1])]
    )
    mean: Floats = np.diff(at_edges, axis=0) / np.diff(edges_s)[:, None]
    return mean


def timeline_image(timeline: Timeline, fmt: str, hours: tuple[float, float] | None = None) -> bytes:
    """The fleet's timeline above its cost; `hours` cuts a window out of the run."""
    window_s = (0.0, timeline.end_s) if hours is None else (hours[0] * 3600, hours[1] * 3600)
    nodes = _nodes_in(timeline, window_s)
    height = min(max(0.26 * len(nodes), 0.5 * min(len(nodes), 4)), 16.0)
    figure = Figure(figsize=(13, height + 3.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[height, 1.8])
    scale, unit = _time_unit(window_s[1] - window_s[0])
    _draw_nodes(top, timeline, nodes, window_s, scale)
    _draw_cost(bottom, [timeline], scale)
    bottom.set_xlim(window_s[0] / scale, window_s[1] / scale)
    bottom.set_xlabel(f"time ({unit})")
    figure.suptitle(timeline.title, x=0.01, ha="left", fontsize=12, color=_INK)
    return _render(figure, fmt)


def comparison_image(title: str, timelines: Sequence[Timeline], fmt: str) -> bytes:
    """Cost over time of several policies on one scenario, and their totals beside it."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2.4, 1])
    end_s = max(timeline.end_s for timeline in timelines)
    scale, unit = _time_unit(end_s)
    _draw_cost(left, timelines, scale)
    left.set_xlim(0, end_s / scale)
    left.set_xlabel(f"time ({unit})")
    rows = list(reversed(list(enumerate(timelines))))
    costs = [timeline.cost / 1000 for _, timeline in rows]
    colours = [_COLOURS[number % len(_COLOURS)] for number, _ in rows]
    bars = right.barh([timeline.label for _, timeline in rows], costs, color=colours)
    labels = [f" {timeline.cost / 1000:.2f}   {timeline.note}" for _, timeline in rows]
    right.bar_label(bars, labels, fontsize=9)
    right.set_xlim(0, 1.45 * max(costs))
    right.set_xlabel(r"total cost (thousand \$)")
    _bare(right)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return _render(figure, fmt)


def contribution_image(kinds: Mapping[str, Mapping[str, Mapping[str, float]]], fmt: str) -> bytes:
    """What each kind of slack saves in cost and in time, with the spread over the seeds."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    names = list(kinds)[::-1]
    measures = (("cost", r"saved (\$)"), ("completed_s", "saved (s)"))
    for axes, (measure, label) in zip(figure.subplots(1, 2), measures, strict=True):
        rows = [kinds[name][measure] for name in names]
        saved = [-row["mean"] for row in rows]
        low = [row["most"] - row["mean"] for row in rows]
        high = [row["mean"] - row["least"] for row in rows]
        axes.barh(names, saved, xerr=[low, high], color=_COLOURS[0], capsize=3)
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.set_xlabel(label)
        _bare(axes)
    figure.suptitle("What each kind of slack brings", x=0.01, ha="left", fontsize=12)
    return _render(figure, fmt)


def job_colours(jobs: Sequence[JobId]) -> dict[JobId, str]:
    """A colour for each job, in order of first appearance."""
    seen = dict.fromkeys(jobs)
    return {job: _COLOURS[number % len(_COLOURS)] for number, job in enumerate(seen)}


def _nodes_in(timeline: Timeline, window_s: tuple[float, float]) -> list[NodeId]:
    inside = {
        rental.node
        for rental in timeline.rentals
        if rental.end_s > window_s[0] and rental.start_s < window_s[1]
    }
    return sorted(inside, key=node_order)


def _draw_nodes(
    axes: Any, timeline: Timeline, nodes: list[NodeId], window_s: tuple[float, float], scale: float
) -> None:
    def inside(part: Span | Rental) -> bool:
        return part.end_s > window_s[0] and part.start_s < window_s[1]

    rentals = [rental for rental in timeline.rentals if inside(rental)]
    spans = [span for span in timeline.spans if inside(span)]
    colours = job_colours([span.job for span in spans])
    blended = _too_short_to_draw(spans, window_s)
    if blended:
        _draw_strips(axes, nodes, rentals, spans, colours, window_s, scale)
    else:
        _draw_boxes(axes, nodes, rentals, spans, colours, scale)
    axes.set_ylim(len(nodes) - 0.4, -0.6)
    step = max(1, len(nodes) // 48)
    axes.set_yticks(range(0, len(nodes), step), nodes[::step], fontsize=8)
    _divide_pools(axes, nodes)
    _bare(axes)
    _add_legend(axes, colours, blended, any(_rolls_out_on_train_node(span) for span in spans))


def _too_short_to_draw(spans: Sequence[Span], window_s: tuple[float, float]) -> bool:
    if not spans:
        return False
    mean_s = sum(span.end_s - span.start_s for span in spans) / len(spans)
    return mean_s / (window_s[1] - window_s[0]) * _PIXELS < _SHORTEST_PIXELS


def _draw_strips(
    axes: Any,
    nodes: list[NodeId],
    rentals: list[Rental],
    spans: list[Span],
    colours: dict[JobId, str],
    window_s: tuple[float, float],
    scale: float,
) -> None:
    edges_s = np.linspace(*window_s, _PIXELS + 1)
    rgb = {job: to_rgb(colour) for job, colour in colours.items()}
    strips = node_strips(nodes, rentals, spans, rgb, to_rgb(_BUBBLE), edges_s)
    for row in range(len(nodes)):
        extent = (window_s[0] / scale, window_s[1] / scale, row + 0.4, row - 0.4)
        axes.imshow(strips[row : row + 1], extent=extent, aspect="auto", interpolation="nearest")


def _draw_boxes(
    axes: Any,
    nodes: list[NodeId],
    rentals: list[Rental],
    spans: list[Span],
    colours: dict[JobId, str],
    scale: float,
) -> None:
    row = {node: number for number, node in enumerate(nodes)}

    def add(parts: Sequence[Span | Rental], fill: Any, top: float = -0.4) -> None:
        boxes = []
        for part in parts:
            left, right = part.start_s / scale, part.end_s / scale
            high, low = row[part.node] + top, row[part.node] + 0.4
            boxes.append([(left, high), (right, high), (right, low), (left, low)])
        drawn = PolyCollection(boxes, facecolors=fill, edgecolors="none", linewidths=0)
        axes.add_collection(drawn, autolim=False)

    runs = [span for span in spans if span.kind == "run"]
    tails = [span for span in spans if span.kind == "tail"]
    add(rentals, _BUBBLE)
    add(runs, [_fill(span, colours[span.job]) for span in runs])
    add(tails, [colours[span.job] for span in tails], top=0.15)  # a few devices of the node
    add([span for span in spans if span.kind == "switch"], _SWITCH)


def _fill(span: Span, colour: str) -> tuple[float, float, float]:
    """A job's colour, lighter where it rolls out on a train node."""
    red, green, blue = to_rgb(colour)
    if not _rolls_out_on_train_node(span):
        return red, green, blue
    return (1 + red) / 2, (1 + green) / 2, (1 + blue) / 2


def _rolls_out_on_train_node(span: Span) -> bool:
    return span.phase is Phase.ROLLOUT and span.node.startswith(Role.TRAIN)


def _divide_pools(axes: Any, nodes: list[NodeId]) -> None:
    ranks = [node_order(node)[0] for node in nodes]
    for number in range(1, len(ranks)):
        if ranks[number] != ranks[number - 1]:
            axes.axhline(number - 0.5, color=_INK, linewidth=0.8)


def _add_legend(axes: Any, colours: dict[JobId, str], blended: bool, colocated: bool) -> None:
    patches = [Patch(color=colour, label=job) for job, colour in colours.items()]
    if len(patches) > _LEGEND_JOBS:
        patches = [Patch(color=_COLOURS[0], label=f"one colour per job ({len(patches)} jobs)")]
    patches.append(Patch(color=_BUBBLE, label="bubble: rented, idle"))
    if blended:
        patches.append(Patch(color="#b9cbdc", label="paler: idle part of the time"))
    else:
        patches.append(Patch(color=_SWITCH, label="switch"))
        if colocated:
            patches.append(Patch(color="#9bc0e0", label="lighter: rolls out on a train node"))
    axes.legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=9,
        frameon=False,
        fontsize=8,
        borderaxespad=0.2,
    )


def _draw_cost(axes: Any, timelines: Sequence[Timeline], scale: float) -> None:
    for number, timeline in enumerate(timelines):
        steps = [*timeline.cost_steps, CostStep(timeline.end_s, 0.0)]
        times = [step.at_s / scale for step in steps]
        prices = [step.price_per_h for step in steps]
        colour = _COLOURS[number % len(_COLOURS)]
        if len(timelines) == 1:
            axes.fill_between(times, prices, step="post", color=colour, alpha=0.2, linewidth=0)
        axes.step(times, prices, where="post", color=colour, label=timeline.label, linewidth=1.3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(r"cost (\$/h)")
    axes.grid(axis="y", color="#eeeeee", zorder=0)
    _bare(axes)
    if len(timelines) > 1:
        axes.legend(frameon=False, fontsize=8, ncols=2)


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=8)


def _time_unit(length_s: float) -> tuple[float, str]:
    for seconds, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if length_s > 2 * seconds:
            return seconds, unit
    return 1.0, "seconds"


def _render(figure: Figure, fmt: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=fmt, dpi=130)
    return buffer.getvalue()
