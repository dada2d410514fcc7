"""Which wholes and deltas of a job's versions a store may drop: those that nobody needs any more.

Kept are: what is pinned (a sampling session, a checkpoint), the newest `keep_newest` versions, and
every delta on the cheapest way from a version that some instance still holds to the newest. Pure.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from slackwater.policy.weights.pull_route import Delta, PullRoutePolicy


@dataclass(frozen=True, slots=True)
class StoredVersions:
    """What a store holds of one job, oldest version first, and who leans on it.

    `pinned` must stay readable; `held` are the versions that instances have now; `reading` are
    being pulled this moment.
    """

    order: tuple[str, ...]
    wholes: Mapping[str, int]
    deltas: Sequence[Delta]
    pinned: Collection[str] = ()
    held: Collection[str] = ()
    reading: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Drops:
    """What may go now."""

    wholes: tuple[str, ...]
    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class RetentionByNeed:
    """Keep what somebody needs; everything else may go."""

    keep_newest: int = 1
    way: PullRoutePolicy = field(default_factory=PullRoutePolicy)

    def decide(self, shelf: StoredVersions) -> Drops:
        """What to drop. Every version that must stay readable can still be reached whole by a
        newcomer.
        """
        newest = shelf.order[-self.keep_newest :] if self.keep_newest else ()
        wanted = [
            version
            for version in shelf.order
            if version in newest or version in shelf.pinned or version in shelf.reading
        ]
        keep_wholes: set[str] = set()
        keep_deltas: set[Delta] = set()
        for version in wanted:  # a newcomer's way
            self._keep(shelf, version, (), keep_wholes, keep_deltas)
            if version in shelf.reading:  # whichever way it is being read, it stays open
                keep_deltas.update(d for d in shelf.deltas if d.version == version)
                keep_wholes.update({version} & shelf.wholes.keys())
        if shelf.order:
            for held in shelf.held:
                self._keep(shelf, shelf.order[-1], (held,), keep_wholes, keep_deltas)
        return Drops(
            tuple(
                version for version in shelf.order if version in shelf.wholes.keys() - keep_wholes
            ),
            tuple(delta for delta in shelf.deltas if delta not in keep_deltas),
        )

    def _keep(
        self,
        shelf: StoredVersions,
        version: str,
        held: Collection[str],
        wholes: set[str],
        deltas: set[Delta],
    ) -> None:
        way = self.way.choose(version, held, shelf.wholes, shelf.deltas)
        if way is not None:
            deltas.update(way.deltas)
            if way.fetch_start:
                wholes.add(way.start)
