"""A hub's key for whoever dials."""

from slackwater.wire import messages


class OneKey:
    """The same key for every name, for a hub without nodes: measurements and tests."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def key_of(self, request: messages.ConnectRequest) -> bytes | None:
        del request
        return self._key

    def check(self, request: messages.ConnectRequest, hello: messages.Hello) -> None:
        """Nothing is known of anybody."""
