"""The baseline of the tree of pulls."""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.policy.weights.source import PayloadHolder, PayloadSource


@dataclass(frozen=True, slots=True)
class FlatSource:
    """The baseline: everybody takes it from a member that has all of it, wherever that is."""

    def choose(
        self, puller: PayloadHolder, holders: Sequence[PayloadHolder]
    ) -> PayloadSource | None:
        """The first complete holder by name."""
        complete = [h for h in holders if h.complete and h.member != puller.member]
        if not complete:
            return None
        best = min(complete, key=lambda holder: (holder.depth, holder.member))
        return PayloadSource(best.member, crosses=best.site != puller.site)
