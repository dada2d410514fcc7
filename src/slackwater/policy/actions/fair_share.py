"""Start-time fair queueing: the tenant that had the least service over its weight goes first.

A tenant is charged for what its actions held: at most `QUANTUM_S` in advance, the rest while they
run and when they end, so that false durations win nothing. A tenant that was idle comes back level
with the others.
"""

from collections.abc import Iterable

from slackwater.model.ids import TenantId

QUANTUM_S = 1.0


class FairShare:
    """Unit-seconds by weight, for each tenant of one queue."""

    def __init__(self) -> None:
        self._service_s: dict[TenantId, float] = {}
        self._clock = 0.0  # what the active tenant that had least has had; never goes back

    def service_s(self, tenant: TenantId) -> float:
        return self._service_s.get(tenant, 0.0)

    def charge(self, tenant: TenantId, unit_s: float, weight: float) -> None:
        self._service_s[tenant] = self.service_s(tenant) + unit_s / weight

    def advance(self, active: Iterable[TenantId]) -> None:
        """Time goes by for everybody who waits or runs."""
        least = min((self.service_s(tenant) for tenant in active), default=self._clock)
        self._clock = max(self._clock, least)

    def activate(self, tenant: TenantId) -> None:
        """It had nothing to do, and now it has."""
        self._service_s[tenant] = max(self.service_s(tenant), self._clock)


def advance_charge_s(units: int, expected_s: float) -> float:
    """What a start is charged before anything is known of it."""
    return units * min(expected_s, QUANTUM_S)
