"""Records of what a controller handled and commanded, and their replay.

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

# Former names of messages, as older records have them.
_FORMER_NAMES = {
    "AbortOn": "AbortTurn",
    "Dispatch": "DispatchTurn",
    "DrainAsked": "DrainRequested",
    "DropGradients": "DiscardGradients",
    "EnvironmentAsked": "EnvironmentRequested",
    "ForgetModel": "DropModel",
    "PullWeights": "PullVersion",
    "RestoreState": "RestoreModel",
    "TakeBack": "ReclaimNode",
    "TakeSnapshot": "SaveState",
}


def encode_message(value: object) -> dict[str, Any]:
    """A message as plain data with its type's name."""
    return {"type": type(value).__name__, "body": msgspec.to_builtins(value, enc_hook=_plain)}


def _plain(value: object) -> list[Any]:
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be recorded")


def record_line(event: object, commands: Sequence[object]) -> bytes:
    """One event and the commands that answered it, as a line of a record."""
    line = {
        "event": encode_message(event),
        "commands": [encode_message(command) for command in commands],
    }
    return msgspec.json.encode(line) + b"\n"


def read_entry(line: bytes) -> dict[str, Any]:
    """A line of a record as plain data; messages have their present names."""
    entry: dict[str, Any] = msgspec.json.decode(line)
    for message in (entry["event"], *entry["commands"]):
        message["type"] = _FORMER_NAMES.get(message["type"], message["type"])
    return entry


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first recorded event that the controller answered with other commands."""

    line: int
    event: dict[str, Any]
    recorded: list[dict[str, Any]]
    replayed: list[dict[str, Any]]


def replay(
    controller: Controller[Any, Any], lines: Iterable[bytes], event_types: Mapping[str, type]
) -> tuple[int, Divergence | None]:
    """Feed a record to a fresh controller; return how many events agreed, and the first that did
    not.
    """
    agreed = 0
    for number, line in enumerate(lines, start=1):
        entry = read_entry(line)
        name = entry["event"]["type"]
        if name not in event_types:
            raise ConfigError.of(
                f"record line {number}", name, "is not an event of this controller"
            )
        event: Any = msgspec.convert(entry["event"]["body"], event_types[name])
        answered = [encode_message(command) for command in controller.handle(event)]
        # Through JSON and back, so that tuples and lists compare equal.
        replayed = msgspec.json.decode(msgspec.json.encode(answered))
        if replayed != entry["commands"]:
            return agreed, Divergence(number, entry["event"], entry["commands"], replayed)
        agreed += 1
    return agreed, None
