"""How much KV memory a service lends, in pages or any common unit: set at each RL step, cut under
pressure, then frozen (ROSE 4.1).
"""

from dataclasses import dataclass, replace

HEADROOM_SHARE = 0.2  # of the capacity: stays free beside recent use
_WATERMARK = 0.5  # of the headroom: once the service has used so much, there is pressure
_KEPT_SHARE = 0.5  # of what is lent, after a cut


@dataclass(frozen=True, slots=True)
class KvBudget:
    """`lent` of `capacity` may be used by rollouts until the next RL step."""

    capacity: int
    lent: int = 0

    @property
    def headroom(self) -> int:
        return int(self.capacity * HEADROOM_SHARE)

    @property
    def pressed_above(self) -> int:
        """Serving use that is pressure."""
        kept_free = int(self.headroom * (1.0 - _WATERMARK))
        return self.capacity - self.lent - kept_free

    def renew(self, serving_peak: int) -> "KvBudget":
        """The budget of a new RL step after the service lately used `serving_peak` at most."""
        return replace(self, lent=max(self.capacity - serving_peak - self.headroom, 0))

    def cut_for(self, serving_use: int) -> "KvBudget":
        """The budget for this serving use: the same, or cut until there is no pressure."""
        budget = self
        while budget.lent > 0 and serving_use > budget.pressed_above:
            budget = replace(budget, lent=int(budget.lent * _KEPT_SHARE))
        return budget
