"""Timers: how a controller without a clock of its own asks to be woken.

Every controller asks with the same `SetTimer` and hears the same `TimerFired`. Where several
controllers share one body, the part of the name before the first ":" says whose timer it is.
"""

from slackwater.control.message import Message, TimedMessage


class SetTimer(Message, frozen=True):
    """Send `TimerFired(name)` at `at_s`; a later timer of the same name replaces this one."""

    name: str
    at_s: float


class TimerFired(TimedMessage, frozen=True):
    """A timer set by `SetTimer` is due."""

    name: str
