"""The tail of a step's rollout, and whether it fits the caches of some of the instances. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.policy.rollout.working_set import Tokens, most_expected


@dataclass(frozen=True, slots=True)
class Room:
    """An instance that stays: its working set, the size of its cache, and its free slots."""

    expected_tokens: Tokens
    kv_tokens: int
    slots: int


@dataclass(frozen=True, slots=True)
class TailTrajectory:
    """A started trajectory that needs another instance; one that `runs` needs a slot there now."""

    expected_tokens: Tokens
    runs: bool


@dataclass(frozen=True, slots=True)
class Tail:
    """What is left of a step if its local engines stop now. `starts`: trajectories that wait for
    their first turn.
    """

    starts: int
    moving: Sequence[TailTrajectory]
    rooms: Sequence[Room]


def assign_tail(tail: Tail) -> list[int] | None:
    """A room for each moving trajectory that holds all of its own as contexts grow, or None: the
    largest first, each where most is left.
    """
    contents = [room.expected_tokens for room in tail.rooms]
    left = [room.kv_tokens - most_expected(room.expected_tokens) for room in tail.rooms]
    slots = [room.slots for room in tail.rooms]
    places = [-1] * len(tail.moving)
    needs = [most_expected(trajectory.expected_tokens) for trajectory in tail.moving]
    for index in sorted(range(len(needs)), key=needs.__getitem__, reverse=True):
        runs = tail.moving[index].runs
        able = [place for place, free in enumerate(slots) if free > 0 or not runs]
        if not able:
            return None
        place = max(able, key=left.__getitem__)
        contents[place] = contents[place] + tail.moving[index].expected_tokens
        left[place] = tail.rooms[place].kv_tokens - most_expected(contents[place])
        if left[place] < 0:
            return None
        slots[place] -= runs
        places[index] = place
    return places
