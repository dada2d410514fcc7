"""Limits the live turns of each tenant to an equal share."""

from collections import Counter
from collections.abc import Collection

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import TenantId


class TurnShares:
    """Counts live turns by tenant, of every API."""

    def __init__(self, max_live_turns: int, tenants: Collection[str]) -> None:
        self.share = max(max_live_turns // max(len(tenants), 1), 1)
        self._live: Counter[TenantId] = Counter()

    def check(self, tenant: TenantId, turns: int, field: str) -> None:
        """Raise if a tenant can never have so many turns (`field` is too large), or not now."""
        if turns > self.share:
            raise ConfigError.of(field, turns, f"must be at most {self.share} in one request")
        live = self._live[tenant]
        if live + turns > self.share:
            raise UnavailableError(
                f"{live} samples of yours are under way, {turns} more would be above your share of "
                f"{self.share}; try again"
            )

    def take(self, tenant: TenantId, turns: int) -> None:
        self._live[tenant] += turns

    def give_back(self, tenant: TenantId, turns: int) -> None:
        self._live[tenant] -= turns
        assert self._live[tenant] >= 0, "a tenant gave back more turns than it took"

    def live(self) -> dict[TenantId, int]:
        """Live turns by tenant."""
        return {tenant: count for tenant, count in self._live.items() if count}
