"""Curves in a terminal."""

from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def squeezed(values: Sequence[float], width: int) -> list[float]:
    """At most `width` numbers: means of neighbouring ones."""
    if len(values) <= width:
        return list(values)
    edges = [round(place * len(values) / width) for place in range(width + 1)]
    parts = [values[edges[i] : edges[i + 1]] for i in range(width)]
    return [sum(part) / len(part) for part in parts]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """One line; the lowest value is the lowest block."""
    shown = squeezed(values, width)
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[1 + round((value - low) * scale)] for value in shown)


def plot(values: Sequence[float], title: str, width: int = 60, height: int = 8) -> str:
    """A filled curve of `height` lines from 0 (or the lowest value) to the highest."""
    shown = squeezed(values, width)
    if not shown:
        return f"{title}: no points"
    low, high = min(0.0, *shown), max(shown)
    scale = height * 8 / (high - low) if high > low else 0.0
    lines = [title]
    for row in range(height - 1, -1, -1):
        cells = [min(max(round((value - low) * scale) - row * 8, 0), 8) for value in shown]
        label = high if row == height - 1 else low if row == 0 else None
        left = f"{label:8.3f}" if label is not None else " " * 8
        lines.append(f"{left} │{''.join(_BLOCKS[cell] for cell in cells)}")
    lines.append(f"{'':8} └{'─' * len(shown)} {len(values)} steps")
    return "\n".join(lines)
