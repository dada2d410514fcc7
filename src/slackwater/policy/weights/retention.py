"""Which payloads of a job's versions a store may drop: those that nobody needs any more.

Kept are: what is pinned (a sampling session, a checkpoint), the newest version, and every delta on
the cheapest route from a version that some instance still holds to the newest. Pure.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slackwater.model.payload import Payload
from slackwater.policy.weights.pull_route import Delta, PullRoutePolicy


@dataclass(frozen=True, slots=True)
class StoredVersions:
    """What a store holds of one job, oldest version first: `pinned` must stay readable, instances
    have `held` and are pulling `reading` now.
    """

    order: tuple[str, ...]
    wholes: Mapping[str, int]
    deltas: Sequence[Delta]
    pinned: Collection[str] = ()
    held: Collection[str] = ()
    reading: Collection[str] = ()


def find_drops(stored: StoredVersions, routes: PullRoutePolicy) -> list[Payload]:
    """What to drop; a newcomer can still get every version that must stay readable."""
    kept: set[Payload] = set()

    def keep_route(version: str, held: Collection[str]) -> None:
        route = routes.choose(version, held, stored.wholes, stored.deltas)
        if route is not None:
            kept.update(Payload(delta.version, delta.base) for delta in route.deltas)
            if route.fetch_start:
                kept.add(Payload(route.start))

    payloads = [Payload(version) for version in stored.order if version in stored.wholes]
    payloads += [Payload(delta.version, delta.base) for delta in stored.deltas]
    needed = {*stored.order[-1:], *stored.pinned, *stored.reading}
    for version in stored.order:
        if version in needed:
            keep_route(version, ())  # for a newcomer
    # Whichever way a version is being read, it stays open.
    kept.update(payload for payload in payloads if payload.version in stored.reading)
    for held in stored.held if stored.order else ():
        keep_route(stored.order[-1], (held,))
    return [payload for payload in payloads if payload not in kept]
