"""Which states are evicted from a tier, and which may be loaded early (PlexRL 4.5.1, 4.5.4)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A state that could be evicted. `next_use` is its position in the scheduler's hint of coming
    uses, from 0; None if the hint does not name it.
    """

    name: str
    bytes: int
    last_used_s: float
    next_use: int | None = None


def choose_victims(candidates: Sequence[EvictionCandidate], needed_bytes: int) -> list[str] | None:
    """The states to evict for `needed_bytes`, or None if all are not enough. First come states
    without a hint, least recently used first, then those whose next use is last.
    """
    if needed_bytes <= 0:
        return []
    chosen: list[EvictionCandidate] = []
    room = 0
    for candidate in sorted(candidates, key=_soonest_last):
        chosen.append(candidate)
        room += candidate.bytes
        if room >= needed_bytes:
            break
    if room < needed_bytes:
        return None
    for candidate in list(chosen):  # a large victim may make earlier, smaller ones unnecessary
        if room - candidate.bytes >= needed_bytes:
            chosen.remove(candidate)
            room -= candidate.bytes
    return [candidate.name for candidate in chosen]


def _soonest_last(candidate: EvictionCandidate) -> tuple[bool, int, float, str]:
    hinted = candidate.next_use is not None
    return (hinted, -(candidate.next_use or 0), candidate.last_used_s, candidate.name)


def may_evict(candidate: EvictionCandidate, to_next_use: int) -> bool:
    """Whether an early load for the use at position `to_next_use` may evict this state: its own
    next use is later, or unknown.
    """
    return candidate.next_use is None or candidate.next_use > to_next_use
