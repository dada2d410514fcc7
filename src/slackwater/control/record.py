"""Recording what a controller saw and did, and replaying it.

One JSON line per event: `{"event": {"type": ..., "body": ...}, "commands": [...]}`. A driver
(`driver.py`) writes them; a fresh controller that is fed the record must give the same commands.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from slackwater.control.controller import Controller
from slackwater.model.errors import ConfigError


def tagged(value: object) -> dict[str, Any]:
    """A dataclass as plain data that names its type."""
    return {"type": type(value).__name__, "body": msgspec.to_builtins(value, enc_hook=_plain)}


def _plain(value: object) -> list[Any]:
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be recorded")


def record_line(event: object, commands: Sequence[object]) -> bytes:
    """One event, and what the controller answered, as a line of a record."""
    line = {"event": tagged(event), "commands": [tagged(command) for command in commands]}
    return msgspec.json.encode(line) + b"\n"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first recorded event to which the controller answered otherwise."""

    line: int
    event: dict[str, Any]
    recorded: list[dict[str, Any]]
    replayed: list[dict[str, Any]]


def replay(
    controller: Controller[Any, Any], lines: Iterable[bytes], event_types: Mapping[str, type]
) -> tuple[int, Divergence | None]:
    """Feed a record to a fresh controller: how many events agreed, and the first that did not."""
    agreed = 0
    for number, line in enumerate(lines, start=1):
        entry = msgspec.json.decode(line)
        name = entry["event"]["type"]
        if name not in event_types:
            raise ConfigError.of(f"record line {number}", name, "is no event of this controller")
        event: Any = msgspec.convert(entry["event"]["body"], event_types[name])
        answered = [tagged(command) for command in controller.handle(event)]
        # Through JSON and back, so that tuples and lists compare equal.
        replayed = msgspec.json.decode(msgspec.json.encode(answered))
        if replayed != entry["commands"]:
            return agreed, Divergence(number, entry["event"], entry["commands"], replayed)
        agreed += 1
    return agreed, None
