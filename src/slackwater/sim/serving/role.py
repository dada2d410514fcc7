"""What a simulated serving device does."""

from enum import StrEnum


class ServingRole(StrEnum):
    """Which part of a request a serving device does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
