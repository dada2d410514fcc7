"""What all control messages are."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all control messages: a tagged struct; unknown fields are refused."""
