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
# Fields that tell people why. A later version may say the same in other words.
_TEXTS = frozenset({"error", "lost", "reason"})


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
    not. Commands agree if they differ only in the words of a reason.
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
        recorded = entry["commands"]
        if replayed != recorded and _without_texts(replayed) != _without_texts(recorded):
            return agreed, Divergence(number, entry["event"], recorded, replayed)
        agreed += 1
    return agreed, None


def _without_texts(value: Any) -> Any:
    """Plain data with only whether there is a text, instead of its words."""
    if isinstance(value, dict):
        return {
            key: bool(inner) if key in _TEXTS else _without_texts(inner)
            for key, inner in value.items()
        }
    return [_without_texts(inner) for inner in value] if isinstance(value, list) else value
