"""Each tenant's waiting actions, environments and memory, and the limits on them."""

from dataclasses import dataclass

from slackwater.model.ids import TenantId
from slackwater.model.tenant_limits import TenantLimits

_SHORT_QUEUE, _LONG_QUEUE = 8, 32  # actions or environments of one tenant
_PAUSE_S = 1.0  # mean pause of a tenant with a long queue
_SPREAD = 0.618034  # the golden ratio: its multiples modulo 1 are spread evenly


@dataclass(slots=True, eq=False)
class TenantState:
    """`held_mib` is the memory of its environments, and of running actions without one."""

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
        """How long to delay the tenant's next submission, so that its flood costs others little.
        Actions that already wait are not delayed.

        The pause grows with the queue, so that requests come about as fast as they are served.
        """
        queue = max(self.waiting, self.waiting_environments) - _SHORT_QUEUE
        part = min(max(queue, 0) / (_LONG_QUEUE - _SHORT_QUEUE), 1.0)
        return part * self.long_pause_s()

    def long_pause_s(self) -> float:
        """The pause with a full queue; it varies, so that many connections do not retry at once."""
        self._pauses += 1
        return _PAUSE_S * (0.5 + self._pauses * _SPREAD % 1.0)

    def full_queue_reason(self) -> str | None:
        """Why no more of its actions may wait, or None."""
        most = self.limits.waiting_actions
        if most is None or self.waiting < most:
            return None
        has = f"tenant {self.tenant or '-'} has {self.waiting} actions waiting"
        return f"{has}, as many as it may; try again later"

    def full_environments_reason(self) -> str | None:
        """Why it may have no more environments, or None."""
        most = self.limits.environments
        if self.environments < most:
            return None
        has = f"tenant {self.tenant or '-'} has {self.environments} environments"
        return f"{has}, as many as the operator lets it ([limits] environments); close some"
