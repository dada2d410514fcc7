"""Who should hold a weight version, and which version makes room: as many instances pull a version
as its turns can use (ROSE 4.2: pulled on demand).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

TURNS_PER_HOLDER = 2  # below that, another copy would hardly shorten anything


def count_wanted_holders(turns: int, able: int) -> int:
    """How many of the `able` instances should hold a version that `turns` live turns ask for."""
    return min(able, ceil(turns / TURNS_PER_HOLDER))


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version on an instance, when it was last needed, and whether it is `elsewhere` too."""

    version: str
    turns: int
    retired: bool
    superseded: bool
    needed_at: int
    elsewhere: bool = False


def choose_victim(held: Iterable[HeldVersion], *, include_needed: bool = False) -> str | None:
    """The version that can be missed most: retired, then superseded, then longest not needed. One
    that turns ask for goes only if `include_needed`: first those held elsewhere, then with fewest
    turns.
    """
    found = [version for version in held if include_needed or version.turns == 0]
    return min(found, key=_rank).version if found else None


def _rank(held: HeldVersion) -> tuple[bool, int, bool, bool, int, str]:
    alone = held.turns > 0 and not held.elsewhere
    later = (not held.retired, not held.superseded, held.needed_at, held.version)
    return (alone, held.turns, *later)
