"""Which states leave a tier to make room, and which are brought up before they are asked for
(PlexRL 4.5.1, 4.5.4).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A state that could leave: how much room that gives, when it was last used, and its place in
    the scheduler's hint.

    `next_use` counts from 0; None if the hint does not name it.
    """

    name: str
    bytes: int
    last_used_s: float
    next_use: int | None = None


def victims(candidates: Sequence[EvictionCandidate], needed_bytes: int) -> list[str] | None:
    """The fewest states, furthest from their next use, that make the room; None if all of them
    would not.

    What the hint does not name goes first, the longest unused first; then what is hinted last.
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
    for candidate in list(chosen):  # a large one chosen late may make an earlier small one needless
        if room - candidate.bytes >= needed_bytes:
            chosen.remove(candidate)
            room -= candidate.bytes
    return [candidate.name for candidate in chosen]


def _soonest_last(candidate: EvictionCandidate) -> tuple[bool, int, float, str]:
    hinted = candidate.next_use is not None
    return (hinted, -(candidate.next_use or 0), candidate.last_used_s, candidate.name)


def may_give_way(candidate: EvictionCandidate, to_next_use: int) -> bool:
    """Whether an early load for use number `to_next_use` may push this one out: only what is needed
    later, or not at all.
    """
    return candidate.next_use is None or candidate.next_use > to_next_use
