"""What travels of a weight version."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Payload:
    """A version whole (`base` is empty), or what changed in it since `base`."""

    version: str
    base: str = ""
