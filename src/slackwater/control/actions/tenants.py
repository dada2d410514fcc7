"""What each tenant waits for and holds, against what its operator lets it."""

from dataclasses import dataclass

from slackwater.model.ids import TenantId
from slackwater.model.tenant_limits import TenantLimits

_SHORT_QUEUE, _LONG_QUEUE = 8, 32  # actions or environments of one tenant
_PAUSE_S = 1.0  # of a tenant with a long queue, on average
_SPREAD = 0.618034  # multiples of it, modulo 1, lie far apart


@dataclass(slots=True, eq=False)
class TenantState:
    """`held_mib` is the memory of its environments and of its running actions that have none."""

    tenant: TenantId
    limits: TenantLimits
    waiting: int = 0
    environments: int = 0
    waiting_environments: int = 0
    held_mib: int = 0
    _pauses: int = 0

    @property
    def held_by_weight(self) -> float:
        return self.held_mib / self.limits.weight

    def pause_s(self) -> float:
        """Before its next request for more, so that a flood costs the others little; nothing that
        waits starts later for it.

        The longer the queue the longer, so that requests come as fast as they are served instead
        of all at once.
        """
        queue = max(self.waiting, self.waiting_environments) - _SHORT_QUEUE
        part = min(max(queue, 0) / (_LONG_QUEUE - _SHORT_QUEUE), 1.0)
        return part * self.long_pause_s()

    def long_pause_s(self) -> float:
        """No two are the same, so that many connections do not come back at once."""
        self._pauses += 1
        return _PAUSE_S * (0.5 + self._pauses * _SPREAD % 1.0)

    def no_room(self) -> str | None:
        """Why no more of its actions may wait, if so."""
        most = self.limits.waiting_actions
        if most is None or self.waiting < most:
            return None
        has = f"tenant {self.tenant or '-'} has {self.waiting} actions waiting"
        return f"{has}, as many as it may; try again later"

    def no_environment(self) -> str | None:
        """Why it may have no more environments, if so."""
        most = self.limits.environments
        if self.environments < most:
            return None
        has = f"tenant {self.tenant or '-'} has {self.environments} environments"
        return f"{has}, as many as the operator lets it ([limits] environments); close some"
