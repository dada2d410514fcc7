"""How a holder of some versions comes to another: by deltas or a whole copy, whichever has fewer
bytes (ROSE 4.2). Pure; ties are broken by fewer steps, then by name.
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
    """The changes that make `version` out of `base`."""

    base: str
    version: str
    bytes: int


@dataclass(frozen=True, slots=True)
class PullRoute:
    """Take `start`, whole if `fetch_start`, else as held here; then apply `deltas` in order."""

    start: str
    fetch_start: bool
    deltas: tuple[Delta, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class PullRoutePolicy:
    """The route of fewest bytes; applying a delta costs as much as `step_bytes` of the link."""

    step_bytes: int = 1 << 16

    def choose(
        self, target: str, held: Collection[str], wholes: Mapping[str, int], deltas: Sequence[Delta]
    ) -> PullRoute | None:
        """The cheapest route to `target` from versions that are `held` or can be fetched whole
        (`wholes`, with sizes); None if there is none.
        """
        onward: dict[str, list[Delta]] = {}
        for delta in deltas:
            onward.setdefault(delta.base, []).append(delta)
        begun = [PullRoute(version, False, (), 0) for version in sorted(held)]
        begun += [PullRoute(version, True, (), size) for version, size in sorted(wholes.items())]
        open_ways = [(way.bytes, 0, way.start, number, way) for number, way in enumerate(begun)]
        heapq.heapify(open_ways)
        numbers, done = count(len(begun)), set[str]()
        while open_ways:
            cost, steps, here, _, way = heapq.heappop(open_ways)
            if here == target:
                return way
            if here in done:
                continue
            done.add(here)
            for delta in onward.get(here, ()):
                whole_way = (*way.deltas, delta)
                longer = PullRoute(way.start, way.fetch_start, whole_way, way.bytes + delta.bytes)
                price = cost + delta.bytes + self.step_bytes
                heapq.heappush(open_ways, (price, steps + 1, delta.version, next(numbers), longer))
        return None
