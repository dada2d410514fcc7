"""Events and commands of controllers: immutable structs, so that a record can be replayed.

A message has the same name, whether a controller takes it as an event or emits it as a command.
"""

import msgspec


class Message(msgspec.Struct, frozen=True):
    """A command, or a part of an event."""


class TimedMessage(Message, frozen=True):
    """Something that happened; `now_s` is the only clock that a controller has."""

    now_s: float
