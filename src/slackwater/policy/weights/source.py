"""From which member a puller gets a version: one copy crosses the slow link between sites, then
members of the site pull from each other (WEAVE 5.2). A member can serve a version while it still
pulls it, so the members of a site form a tree. Ties are broken by id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PayloadHolder:
    """A member that holds the version, or still pulls it (`complete` is False). It serves `feeds`
    pullers, and is `depth` pulls away from a member that holds all of it.
    """

    member: str
    node: str
    site: str
    feeds: int = 0
    depth: int = 0
    complete: bool = True


@dataclass(frozen=True, slots=True)
class PayloadSource:
    """Pull from `member`; `crosses` says whether that uses the slow link."""

    member: str
    crosses: bool


class SourcePolicy(Protocol):
    """Chooses from which member a puller gets a version."""

    def choose(
        self, puller: PayloadHolder, holders: Sequence[PayloadHolder]
    ) -> PayloadSource | None:
        """The source for `puller`, or None if it must wait."""


@dataclass(frozen=True, slots=True)
class TreeSource:
    """The nearest holder that serves fewer than `max_feeds` pullers: on the same node, then in the
    same site. The first puller of a site uses the slow link.
    """

    max_feeds: int = 2

    def choose(
        self, puller: PayloadHolder, holders: Sequence[PayloadHolder]
    ) -> PayloadSource | None:
        """The source for `puller`, or None if all are busy. `holders` must exclude members that
        pull from the puller.
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
