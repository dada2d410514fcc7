"""Decides who may connect to the hub: the key of a name, and whether its holder's claims are
plausible.
"""

from typing import Protocol

from slackwater.wire import messages


class Credentials(Protocol):
    """What the hub asks about a peer."""

    def key_of(self, request: messages.ConnectRequest) -> bytes | None:
        """The key of the name that wants to connect; None if nobody of that name is expected."""
        ...

    def check(self, request: messages.ConnectRequest, hello: messages.Hello) -> None:
        """A SlackwaterError if the peer, which has proved its name, claims what it may not."""
        ...
