"""The order of waiting actions: tenants by the service they had, then each tenant's own order."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import TypeAlias

from slackwater.control.actions.live import Attempt, LiveAction
from slackwater.model.ids import TenantId
from slackwater.policy.actions.fair_share import FairShare, advance_charge_s

Entry: TypeAlias = tuple[float, int, LiveAction]


class FairLine:
    """With one tenant it is that tenant's order and nothing else."""

    def __init__(self) -> None:
        self._lines: dict[TenantId, list[Entry]] = {}
        self._running: dict[TenantId, int] = {}
        self._share = FairShare()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, action: LiveAction) -> bool:
        line = self._lines.get(action.spec.tenant, [])
        index = bisect_left(line, action.place_in_line, key=lambda entry: entry[:2])
        return index < len(line) and line[index][2] is action

    @property
    def shared(self) -> bool:
        """Whether several tenants wait."""
        return len(self._lines) > 1

    def add(self, action: LiveAction) -> None:
        tenant = action.spec.tenant
        line = self._lines.get(tenant)
        if line is None:
            if tenant not in self._running:
                self._advance()
                self._share.activate(tenant)
            line = self._lines[tenant] = []
        insort(line, (*action.place_in_line, action))
        self._count += 1

    def remove(self, action: LiveAction) -> None:
        line = self._lines[action.spec.tenant]
        index = bisect_left(line, action.place_in_line, key=lambda entry: entry[:2])
        assert line[index][2] is action
        del line[index]
        self._count -= 1
        if not line:
            del self._lines[action.spec.tenant]

    def in_order(self) -> "FairOrder":
        return FairOrder(self._lines, self._share)

    def first(self, count: int) -> list[LiveAction]:
        return list(islice(self.in_order(), count))

    # ---- what tenants had ----
    def started(self, attempt: Attempt, expected_s: float) -> None:
        """It is charged a little in advance."""
        self._advance()
        tenant = attempt.action.spec.tenant
        self._running[tenant] = self._running.get(tenant, 0) + 1
        self._charge(attempt, advance_charge_s(attempt.units, expected_s))

    def ran(self, attempt: Attempt, now_s: float) -> None:
        """It still runs: what it has held beyond its charge is charged."""
        held_s = attempt.units * (now_s - attempt.started_s)
        self._charge(attempt, max(held_s - attempt.charged_s, 0.0))

    def ended(self, attempt: Attempt, now_s: float) -> None:
        """What it was charged too much is given back."""
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
        self._share.advance({*self._lines, *self._running})


class FairOrder:
    """An iteration over a line; the actions it has yielded count as if they had started."""

    def __init__(self, lines: dict[TenantId, list[Entry]], share: FairShare) -> None:
        self._lines = lines
        self._share = share
        self._given: list[LiveAction] = []
        self._dropped: set[TenantId] = set()
        self._iterator = self._merged() if len(lines) > 1 else self._alone()

    def __iter__(self) -> Iterator[LiveAction]:
        for action in self._iterator:
            self._given.append(action)
            yield action

    def drop(self, tenant: TenantId) -> None:
        self._dropped.add(tenant)

    def after(self, seen: int, count: int) -> list[LiveAction]:
        """So many behind the first that were seen."""
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            return [entry[2] for entry in line[seen : seen + count]]
        missing = seen + count - len(self._given)
        return [*self._given[seen:], *islice(self._iterator, max(missing, 0))]

    def _alone(self) -> Iterator[LiveAction]:
        for line in self._lines.values():
            for entry in line:
                if self._dropped:
                    return
                yield entry[2]

    def _merged(self) -> Iterator[LiveAction]:
        # Equal tenants by who came first, not by rank: priorities are for a tenant's own actions.
        heads = [
            (self._share.had(tenant), line[0][2].came, tenant, 0)
            for tenant, line in self._lines.items()
        ]
        heapify(heads)
        while heads:
            had, _, tenant, index = heads[0]
            line = self._lines[tenant]
            action = line[index][2]
            yield action
            if index + 1 == len(line) or tenant in self._dropped:
                heappop(heads)
            else:
                came = line[index + 1][2].came
                heapreplace(heads, (had + action.cost_s, came, tenant, index + 1))
