"""How many instances should hold a weight version, and which version an instance evicts. As many
instances pull a version as its turns can use (ROSE 4.2: pulled on demand).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

TURNS_PER_HOLDER = 2  # with fewer turns, another copy would hardly save time


def count_wanted_holders(turns: int, able: int) -> int:
    """How many of the `able` instances should hold a version that `turns` live turns need."""
    return min(able, ceil(turns / TURNS_PER_HOLDER))


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version on an instance: how many turns need it there, when it was last needed, and whether
    another instance holds it too (`elsewhere`).
    """

    version: str
    turns: int
    retired: bool
    superseded: bool
    needed_at: int
    elsewhere: bool = False


def choose_victim(held: Iterable[HeldVersion], *, include_needed: bool = False) -> str | None:
    """The version to evict: retired ones first, then superseded ones, then the least recently
    needed. A version that turns need is evicted only with `include_needed`: first those that are
    held elsewhere too, then those with the fewest turns.
    """
    found = [version for version in held if include_needed or version.turns == 0]
    return min(found, key=_rank).version if found else None


def _rank(held: HeldVersion) -> tuple[bool, int, bool, bool, int, str]:
    alone = held.turns > 0 and not held.elsewhere
    later = (not held.retired, not held.superseded, held.needed_at, held.version)
    return (alone, held.turns, *later)
