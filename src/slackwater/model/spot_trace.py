"""Spot traces: when instances were given and taken away. Pure: lines in, events out."""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from slackwater.model.errors import ConfigError
from slackwater.model.ids import InstanceId

_COLUMNS = ("t_s", "event", "instance_id")


@dataclass(frozen=True, slots=True)
class SpotEvent:
    """`instance` came (`add`) or was preempted (`remove`) at `t_s` from the start of the trace."""

    t_s: float
    event: Literal["add", "remove"]
    instance: InstanceId


def spot_events(lines: Iterable[str], name: str = "spot trace") -> tuple[SpotEvent, ...]:
    """The events of a trace with the columns `t_s,event,instance_id`, in order of time.

    An id comes once and goes at most once; anything else is refused with the line that says it.
    """
    reader = csv.DictReader(lines)
    if tuple(reader.fieldnames or ()) != _COLUMNS:
        raise ConfigError.of(f"{name}: columns", reader.fieldnames, f"must be {','.join(_COLUMNS)}")
    events = [_event(row, f"{name}: line {reader.line_num}") for row in reader]
    events.sort(key=lambda event: (event.t_s, event.event, event.instance))
    present: set[InstanceId] = set()
    seen: set[InstanceId] = set()
    for event in events:
        if event.event == "add" and event.instance not in seen:
            present.add(event.instance)
            seen.add(event.instance)
        elif event.event == "remove" and event.instance in present:
            present.discard(event.instance)
        else:
            why = "comes twice" if event.event == "add" else "goes without having come"
            raise ConfigError.of(f"{name}: t_s {event.t_s:g}: instance_id", event.instance, why)
    return tuple(events)


def _event(row: dict[str, str], at: str) -> SpotEvent:
    try:
        t_s = float(row["t_s"])
    except (TypeError, ValueError):
        t_s = math.nan
    if not (math.isfinite(t_s) and t_s >= 0):
        raise ConfigError.of(f"{at}: t_s", row["t_s"], "must be seconds from the start, at least 0")
    if row["event"] not in ("add", "remove"):
        raise ConfigError.of(f"{at}: event", row["event"], "must be add or remove")
    if not row["instance_id"]:
        raise ConfigError.of(f"{at}: instance_id", row["instance_id"], "must name an instance")
    kind = cast(Literal["add", "remove"], row["event"])
    return SpotEvent(t_s, kind, InstanceId(row["instance_id"]))
