"""The queue of waiting actions: tenants by the service they received, then each tenant's order."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import TypeAlias

from slackwater.control.actions.live import Attempt, LiveAction
from slackwater.model.ids import TenantId
from slackwater.policy.actions.fair_share import FairShare, advance_charge_s

Entry: TypeAlias = tuple[float, int, LiveAction]


class FairQueue:
    """Waiting actions in fair order. With one tenant this is that tenant's own order."""

    def __init__(self) -> None:
        self._queues: dict[TenantId, list[Entry]] = {}
        self._running: dict[TenantId, int] = {}
        self._share = FairShare()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def shared(self) -> bool:
        """Whether several tenants wait."""
        return len(self._queues) > 1

    def add(self, action: LiveAction) -> None:
        tenant = action.spec.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            if tenant not in self._running:
                self._advance()
                self._share.activate(tenant)
            queue = self._queues[tenant] = []
        insort(queue, (*action.queue_position, action))
        self._count += 1

    def remove(self, action: LiveAction) -> None:
        queue = self._queues[action.spec.tenant]
        index = bisect_left(queue, action.queue_position, key=lambda entry: entry[:2])
        assert queue[index][2] is action
        del queue[index]
        self._count -= 1
        if not queue:
            del self._queues[action.spec.tenant]

    def iterate(self) -> "FairOrder":
        return FairOrder(self._queues, self._share)

    def first(self, count: int) -> list[LiveAction]:
        return list(islice(self.iterate(), count))

    # ---- charges for service received ----
    def charge_start(self, attempt: Attempt, expected_s: float) -> None:
        """Charge the tenant a little in advance."""
        self._advance()
        tenant = attempt.action.spec.tenant
        self._running[tenant] = self._running.get(tenant, 0) + 1
        self._charge(attempt, advance_charge_s(attempt.units, expected_s))

    def charge_running(self, attempt: Attempt, now_s: float) -> None:
        """Charge a running attempt for what it has held beyond its charge so far."""
        held_s = attempt.units * (now_s - attempt.started_s)
        self._charge(attempt, max(held_s - attempt.charged_s, 0.0))

    def settle(self, attempt: Attempt, now_s: float) -> None:
        """Correct the charge of an ended attempt to what it used."""
        tenant = attempt.action.spec.tenant
        self._charge(attempt, attempt.units * (now_s - attempt.started_s) - attempt.charged_s)
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def _charge(self, attempt: Attempt, unit_s: float) -> None:
        action = attempt.action
        attempt.charged_s += unit_s
        self._share.charge(action.spec.tenant, unit_s, action.owner.limits.weight)

    def _advance(self) -> None:
        self._share.advance({*self._queues, *self._running})


class FairOrder:
    """An iteration over a queue; the actions it has yielded count as if they had started."""

    def __init__(self, queues: dict[TenantId, list[Entry]], share: FairShare) -> None:
        self._queues = queues
        self._share = share
        self._yielded: list[LiveAction] = []
        self._dropped: set[TenantId] = set()
        self._iterator = self._merge_tenants() if len(queues) > 1 else self._iterate_one_tenant()

    def __iter__(self) -> Iterator[LiveAction]:
        for action in self._iterator:
            self._yielded.append(action)
            yield action

    def drop(self, tenant: TenantId) -> None:
        self._dropped.add(tenant)

    def after(self, seen: int, count: int) -> list[LiveAction]:
        """The next `count` actions after the first `seen`."""
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            return [entry[2] for entry in queue[seen : seen + count]]
        missing = seen + count - len(self._yielded)
        return [*self._yielded[seen:], *islice(self._iterator, max(missing, 0))]

    def _iterate_one_tenant(self) -> Iterator[LiveAction]:
        for queue in self._queues.values():
            for entry in queue:
                if self._dropped:
                    return
                yield entry[2]

    def _merge_tenants(self) -> Iterator[LiveAction]:
        # Ties between tenants go by arrival, not rank: priorities order one tenant's actions.
        heads = [
            (self._share.service_s(tenant), queue[0][2].arrival, tenant, 0)
            for tenant, queue in self._queues.items()
        ]
        heapify(heads)
        while heads:
            had, _, tenant, index = heads[0]
            queue = self._queues[tenant]
            action = queue[index][2]
            yield action
            if index + 1 == len(queue) or tenant in self._dropped:
                heappop(heads)
            else:
                arrival = queue[index + 1][2].arrival
                heapreplace(heads, (had + action.cost_s, arrival, tenant, index + 1))
