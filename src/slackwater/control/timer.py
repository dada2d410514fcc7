"""Timers: how a controller without a clock asks to be woken.

Where several controllers share one driver, the beginning of the name says whose timer it is.
"""

from slackwater.control.message import Message, TimedMessage


class SetTimer(Message, frozen=True):
    """Send `TimerFired(name)` at `at_s`; a later timer of the same name replaces this one."""

    name: str
    at_s: float


class TimerFired(TimedMessage, frozen=True):
    """A timer set by `SetTimer` is due."""

    name: str
