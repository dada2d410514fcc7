"""Spot traces: when instances were added and removed."""

import csv
import gzip
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slackwater.model.errors import ConfigError

_COLUMNS = ("t_s", "event", "instance_id")


@dataclass(frozen=True, slots=True)
class SpotEvent:
    """An instance is added (`add`) or removed (`remove`), `t_s` into the trace."""

    t_s: float
    event: str
    instance_id: str

    def __post_init__(self) -> None:
        if self.event not in ("add", "remove"):
            raise ConfigError.of("event", self.event, "must be add or remove")
        if not (math.isfinite(self.t_s) and self.t_s >= 0):
            raise ConfigError.of("t_s", self.t_s, "must be seconds from the start, at least 0")
        if not self.instance_id:
            raise ConfigError.of("instance_id", self.instance_id, "must name an instance")


def sort_events(events: Iterable[SpotEvent], name: str = "spot trace") -> tuple[SpotEvent, ...]:
    """Sort by time; refuse an id that is added twice, or removed before it was added."""
    ordered = sorted(events, key=lambda event: event.t_s)
    present: dict[str, bool] = {}
    for event in ordered:
        before = present.get(event.instance_id)
        if event.event == "add" and before is not None:
            why = "is added twice; use a new id"
        elif event.event == "remove" and not before:
            why = "is removed before it is added"
        else:
            present[event.instance_id] = event.event == "add"
            continue
        raise ConfigError.of(f"{name}: t_s {event.t_s:g}: instance_id", event.instance_id, why)
    return tuple(ordered)


def read_spot_trace(file: Path) -> tuple[SpotEvent, ...]:
    """The events of a `.csv` or `.csv.gz` file."""
    if not file.is_file():
        raise ConfigError.of("spot trace", str(file), "is not a file")
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8-sig", newline="") as lines:
            return spot_events(lines, file.name)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError.of("spot trace", str(file), f"cannot be read: {error}") from None


def spot_events(lines: Iterable[str], name: str = "spot trace") -> tuple[SpotEvent, ...]:
    """The events of a trace with the columns `t_s,event,instance_id`, in order of time."""
    reader = csv.DictReader(lines)
    if tuple(reader.fieldnames or ()) != _COLUMNS:
        raise ConfigError.of(f"{name}: columns", reader.fieldnames, f"must be {','.join(_COLUMNS)}")
    return sort_events((_event(row, f"{name}: line {reader.line_num}") for row in reader), name)


def _event(row: dict[str, str], at: str) -> SpotEvent:
    try:
        t_s = float(row["t_s"])
    except (TypeError, ValueError):
        raise ConfigError.of(f"{at}: t_s", row["t_s"], "must be seconds from the start") from None
    try:
        return SpotEvent(t_s, row["event"] or "", row["instance_id"] or "")
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from None
