"""A job's curves: `metrics.jsonl` of its run's folder, thinned for a chart."""

import json
from pathlib import Path
from typing import Any

_MAX_BYTES = 16 << 20
_MAX_POINTS = 600


def read_curves(path: Path) -> dict[str, list[float | None]]:
    """Series by name, all of one length, with `step`; empty if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _MAX_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return {}
    rows = [row for line in lines if (row := _row(line)) is not None]
    rows = rows[:: max(-(-len(rows) // _MAX_POINTS), 1)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_number(row.get(name)) for row in rows] for name in names}


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None  # a partial line: the driver is writing it, or was killed
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _number(value: Any) -> float | None:
    is_finite = isinstance(value, int | float) and abs(value) < float("inf")
    return round(float(value), 6) if is_finite else None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A small JSON object in a run's folder; empty if there is none."""
    try:
        found = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
