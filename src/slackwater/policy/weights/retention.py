"""Which payloads of a job's versions a store may drop, because no member needs them any more.

It keeps pinned versions (of a sampling session or a checkpoint), the newest version, and every
delta on the cheapest route to the newest version from a version that an instance still holds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slackwater.model.payload import Payload
from slackwater.policy.weights.pull_route import Delta, PullRoutePolicy


@dataclass(frozen=True, slots=True)
class StoredVersions:
    """What a store holds of one job. `order` lists its versions, oldest first. Versions in `pinned`
    must stay readable; instances hold those in `held`, and are pulling those in `reading`.
    """

    order: tuple[str, ...]
    wholes: Mapping[str, int]
    deltas: Sequence[Delta]
    pinned: Collection[str] = ()
    held: Collection[str] = ()
    reading: Collection[str] = ()


def find_drops(stored: StoredVersions, routes: PullRoutePolicy) -> list[Payload]:
    """The payloads to drop. A member without any version can still get every version that must stay
    readable.
    """
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
            keep_route(version, ())  # for a member without any version
    # A version that is being pulled keeps all its payloads: the route of the puller is not known.
    kept.update(payload for payload in payloads if payload.version in stored.reading)
    for held in stored.held if stored.order else ():
        keep_route(stored.order[-1], (held,))
    return [payload for payload in payloads if payload not in kept]
