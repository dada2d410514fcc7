"""By which route a member gets a version: by deltas from a version that it holds, or from a whole
copy, whichever transfers fewer bytes (ROSE 4.2). Ties are broken by fewer steps, then by name.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

_WORTH_BYTES = 1 << 20


def is_worth_relaying(size: int) -> bool:
    """Whether a version of `size` bytes is worth relaying: a request costs about a MiB."""
    return size >= _WORTH_BYTES


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes that turn `base` into `version`."""

    base: str
    version: str
    bytes: int


@dataclass(frozen=True, slots=True)
class PullRoute:
    """Start from `start`, fetched whole if `fetch_start`, else held already; then apply
    `deltas`.
    """

    start: str
    fetch_start: bool
    deltas: tuple[Delta, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class PullRoutePolicy:
    """The route with the fewest bytes. Applying a delta counts as `step_bytes` more."""

    step_bytes: int = 1 << 16

    def choose(
        self, target: str, held: Collection[str], wholes: Mapping[str, int], deltas: Sequence[Delta]
    ) -> PullRoute | None:
        """The cheapest route to `target` from versions that are `held`, or that can be fetched
        whole (`wholes`, with sizes); None if there is none. This is Dijkstra's algorithm over
        deltas.
        """
        onward: dict[str, list[Delta]] = {}
        for delta in deltas:
            onward.setdefault(delta.base, []).append(delta)
        starts = [PullRoute(version, False, (), 0) for version in sorted(held)]
        starts += [PullRoute(version, True, (), size) for version, size in sorted(wholes.items())]
        queue = [
            (route.bytes, 0, route.start, number, route) for number, route in enumerate(starts)
        ]
        heapq.heapify(queue)
        numbers, done = count(len(starts)), set[str]()
        while queue:
            cost, steps, here, _, route = heapq.heappop(queue)
            if here == target:
                return route
            if here in done:
                continue
            done.add(here)
            for delta in onward.get(here, ()):
                path = (*route.deltas, delta)
                longer = PullRoute(route.start, route.fetch_start, path, route.bytes + delta.bytes)
                price = cost + delta.bytes + self.step_bytes
                heapq.heappush(queue, (price, steps + 1, delta.version, next(numbers), longer))
        return None
