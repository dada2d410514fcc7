"""How much KV memory a service lends: set at each RL step, halved under pressure, then frozen (ROSE
4.1).

Counted in pages, or in any unit that both models' memory is counted in.
"""

from dataclasses import dataclass, replace

from slackwater.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KvBudgetRule:
    """`headroom_share` of the capacity stays free beside recent use; pressure begins when the
    service has used `watermark` of that headroom, and takes all but `kept_share` of what is lent.
    """

    headroom_share: float = 0.2
    watermark: float = 0.5
    kept_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.headroom_share < 1:
            raise ConfigError.of("headroom_share", self.headroom_share, "must be from 0 to below 1")
        for name in ("watermark", "kept_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError.of(name, getattr(self, name), "must be from 0 to below 1")


@dataclass(frozen=True, slots=True)
class KvBudget:
    """`lent` of `capacity` may be used by rollouts until the next RL step."""

    capacity: int
    rule: KvBudgetRule
    lent: int = 0
    cuts: int = 0

    @property
    def headroom(self) -> int:
        return int(self.capacity * self.rule.headroom_share)

    @property
    def pressed_above(self) -> int:
        """Serving use that is pressure."""
        kept_free = int(self.headroom * (1.0 - self.rule.watermark))
        return self.capacity - self.lent - kept_free

    def for_step(self, serving_peak: int) -> "KvBudget":
        """A new RL step begins, and the service lately used `serving_peak` at most."""
        lent = max(self.capacity - serving_peak - self.headroom, 0)
        return replace(self, lent=lent, cuts=0)

    def under(self, serving_use: int) -> "KvBudget":
        """The budget now that the service uses so much: the same, or cut until it is no pressure
        any more.
        """
        budget = self
        while budget.lent > 0 and serving_use > budget.pressed_above:
            kept = int(budget.lent * self.rule.kept_share)
            budget = replace(budget, lent=kept, cuts=budget.cuts + 1)
        return budget
