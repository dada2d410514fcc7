"""Payloads: the units in which weight versions are transferred."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Payload:
    """A whole version (`base` is empty), or its delta to version `base`."""

    version: str
    base: str = ""
