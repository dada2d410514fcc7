"""How much service tenants had, over their weights: whoever had least goes first (start-time fair
queueing).

What a tenant is charged is what its actions held, not what it said they would: a start is charged
at most `QUANTUM_S` in advance, and what an action really held is charged while it runs and when it
ends. So neither long actions that claim to be short nor the reverse win anything. A tenant that had
nothing to do comes back level with those who had: it has saved up nothing, and owes nothing.
"""

from collections.abc import Iterable

from slackwater.model.ids import TenantId

QUANTUM_S = 1.0


class FairShare:
    """Unit-seconds by weight, for each tenant of one queue."""

    def __init__(self) -> None:
        self._had: dict[TenantId, float] = {}
        self._clock = 0.0  # what the active tenant that had least has had; never goes back

    def had(self, tenant: TenantId) -> float:
        return self._had.get(tenant, 0.0)

    def charge(self, tenant: TenantId, unit_s: float, weight: float) -> None:
        self._had[tenant] = self.had(tenant) + unit_s / weight

    def advance(self, active: Iterable[TenantId]) -> None:
        """Time goes by for everybody who waits or runs."""
        least = min((self.had(tenant) for tenant in active), default=self._clock)
        self._clock = max(self._clock, least)

    def activate(self, tenant: TenantId) -> None:
        """It had nothing to do, and now it has."""
        self._had[tenant] = max(self.had(tenant), self._clock)


def advance_charge_s(units: int, expected_s: float) -> float:
    """What a start is charged before anything is known of it."""
    return units * min(expected_s, QUANTUM_S)
