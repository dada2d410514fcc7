"""Start-time fair queueing: the tenant with the least service divided by its weight goes first.

A tenant is charged for the units that its actions hold: at most `QUANTUM_S` in advance, the rest
while they run and when they end, so that false durations gain nothing. A tenant that was idle
rejoins level with the others, and gets no credit for its idle time.
"""

from collections.abc import Iterable

from slackwater.model.ids import TenantId

QUANTUM_S = 1.0


class FairShare:
    """The service of each tenant of one queue: unit-seconds divided by weight."""

    def __init__(self) -> None:
        self._service_s: dict[TenantId, float] = {}
        self._clock = 0.0  # virtual time: the least service of an active tenant; never decreases

    def service_s(self, tenant: TenantId) -> float:
        return self._service_s.get(tenant, 0.0)

    def charge(self, tenant: TenantId, unit_s: float, weight: float) -> None:
        self._service_s[tenant] = self.service_s(tenant) + unit_s / weight

    def advance(self, active: Iterable[TenantId]) -> None:
        """Advance the virtual time to the least service of the active tenants."""
        least = min((self.service_s(tenant) for tenant in active), default=self._clock)
        self._clock = max(self._clock, least)

    def activate(self, tenant: TenantId) -> None:
        """Bring a tenant that was idle up to the virtual time."""
        self._service_s[tenant] = max(self.service_s(tenant), self._clock)


def advance_charge_s(units: int, expected_s: float) -> float:
    """The charge at the start of an action, before its duration is known."""
    return units * min(expected_s, QUANTUM_S)
