"""How much KV memory a service lends, in pages or any other unit. The budget is set at each RL
step, can only be cut until the next one, and is cut when the service needs memory (ROSE 4.1).
"""

from dataclasses import dataclass, replace

HEADROOM_SHARE = 0.2  # of the capacity: not lent, beyond recent use
_WATERMARK = 0.5  # of the headroom: the budget is cut once the service uses more than this
_KEPT_SHARE = 0.5  # of the lent memory, after a cut


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
        """The use by the service above which the budget is cut."""
        kept_free = int(self.headroom * (1.0 - _WATERMARK))
        return self.capacity - self.lent - kept_free

    def renew(self, serving_peak: int) -> "KvBudget":
        """The budget of a new RL step, if the service used at most `serving_peak` in the last
        one.
        """
        return replace(self, lent=max(self.capacity - serving_peak - self.headroom, 0))

    def cut_for(self, serving_use: int) -> "KvBudget":
        """The budget for this use by the service: unchanged, or cut until it is not above the
        limit.
        """
        budget = self
        while budget.lent > 0 and serving_use > budget.pressed_above:
            budget = replace(budget, lent=int(budget.lent * _KEPT_SHARE))
        return budget
