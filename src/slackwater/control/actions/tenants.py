"""What each tenant waits for and holds, against what its operator lets it."""

from dataclasses import dataclass

from slackwater.model.ids import TenantId
from slackwater.model.tenant_limits import TenantLimits

_LONG_QUEUE = 32  # actions of one tenant, from which on more of them may come slowly
_PAUSE_S = 1.0


@dataclass(slots=True, eq=False)
class TenantState:
    """`held_mib` is the memory of its environments and of its running actions that have none."""

    tenant: TenantId
    limits: TenantLimits
    waiting: int = 0
    environments: int = 0
    held_mib: int = 0

    @property
    def held_by_weight(self) -> float:
        return self.held_mib / self.limits.weight

    @property
    def pause_s(self) -> float:
        """Between two requests for more, so that a flood costs the others little; nothing that
        waits starts later for it.
        """
        return _PAUSE_S if self.waiting > _LONG_QUEUE else 0.0

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
