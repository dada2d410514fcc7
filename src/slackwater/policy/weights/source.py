"""From whom a puller takes a version: one copy over the slow link between sites, then from
neighbour to neighbour (WEAVE 5.2). A member may pass on what it has while it pulls, so a site is a
tree. Pure; ties are broken by id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PayloadHolder:
    """A member that has the version, or not yet (`complete` is False). It feeds `feeds` pullers,
    and is `depth` pulls away from a member that has all of it.
    """

    member: str
    node: str
    site: str
    feeds: int = 0
    depth: int = 0
    complete: bool = True


@dataclass(frozen=True, slots=True)
class PayloadSource:
    """Take it from `member`; `crosses` says whether that uses the slow link."""

    member: str
    crosses: bool


class SourcePolicy(Protocol):
    """Chooses from whom a puller takes a version."""

    def choose(
        self, puller: PayloadHolder, holders: Sequence[PayloadHolder]
    ) -> PayloadSource | None:
        """Where `puller` takes it from; None means: wait."""


@dataclass(frozen=True, slots=True)
class TreeSource:
    """The nearest holder with room: same node, then same site, then one puller per site over the
    slow link. A holder feeds at most `max_feeds`.
    """

    max_feeds: int = 2

    def choose(
        self, puller: PayloadHolder, holders: Sequence[PayloadHolder]
    ) -> PayloadSource | None:
        """Where `puller` takes it from; None: wait, since all are busy. `holders` excludes those
        that take it from the puller.
        """
        others = [holder for holder in holders if holder.member != puller.member]
        near = [holder for holder in others if holder.site == puller.site]
        with_room = [holder for holder in near if holder.feeds < self.max_feeds]
        if with_room:
            best = min(with_room, key=lambda holder: self._rank(puller, holder))
            return PayloadSource(best.member, crosses=False)
        if near:
            return None
        far = [holder for holder in others if holder.complete]
        if not far:
            return None
        best = min(far, key=lambda holder: self._rank(puller, holder))
        return PayloadSource(best.member, crosses=True)

    @staticmethod
    def _rank(puller: PayloadHolder, holder: PayloadHolder) -> tuple[bool, bool, int, int, str]:
        elsewhere = holder.node != puller.node
        return (elsewhere, not holder.complete, holder.depth, holder.feeds, holder.member)
