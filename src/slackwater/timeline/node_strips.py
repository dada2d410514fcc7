"""Node time as rows of pixels, each the mean colour of its interval.

Drawn one by one, phases shorter than a pixel would hide each other and idle time.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slackwater.model.ids import JobId, NodeId
from slackwater.timeline.spans import Rental, Span

Floats = NDArray[np.float64]

WHITE = (1.0, 1.0, 1.0)


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
        busy, busy_colour = _coloured(ran[node], colours, edges_s)
        tail, tail_colour = _coloured(tails[node], colours, edges_s)
        # A tail holds a few devices while the next job runs on the others; it shows where nothing
        # else does.
        free = np.clip(paid - busy, 0.0, 1.0)
        shown = np.minimum(tail, free)
        part = np.divide(shown, tail, out=np.zeros_like(tail), where=tail > 0)
        strips[row] = busy_colour + part * tail_colour
        strips[row] += (free - shown) * idle + (1 - np.maximum(paid, busy)) * WHITE
    return np.clip(strips, 0.0, 1.0)


def _coloured(
    spans: Sequence[Span], colours: Mapping[JobId, tuple[float, float, float]], edges_s: Floats
) -> tuple[Floats, Floats]:
    """How much of each stretch the spans cover, and their colours times that."""
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
