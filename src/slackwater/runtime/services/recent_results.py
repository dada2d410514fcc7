"""Caches the results of recent actions; the store has all of them."""

from collections import OrderedDict

from slackwater.model.ids import ActionId, TenantId
from slackwater.runtime.store.action_log import ActionResult

_MOST_BYTES = 32 << 20
_MOST_RESULTS = 2000


class RecentResults:
    """Bounded by number and by bytes: the output of one action may be megabytes."""

    def __init__(self, most_bytes: int = _MOST_BYTES, most_results: int = _MOST_RESULTS) -> None:
        self._most_bytes, self._most_results = most_bytes, most_results
        self._results: OrderedDict[ActionId, tuple[TenantId, ActionResult]] = OrderedDict()
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def add(self, action: ActionId, tenant: TenantId, result: ActionResult) -> None:
        """Add the newest result and drop the oldest beyond the limits."""
        self._drop(action)
        self._results[action] = (tenant, result)
        self._bytes += _size_bytes(result)
        while self._results and (
            self._bytes > self._most_bytes or len(self._results) > self._most_results
        ):
            self._drop(next(iter(self._results)))

    def find(self, action: ActionId) -> tuple[TenantId | None, ActionResult | None]:
        return self._results.get(action, (None, None))

    def _drop(self, action: ActionId) -> None:
        dropped = self._results.pop(action, None)
        if dropped is not None:
            self._bytes -= _size_bytes(dropped[1])


def _size_bytes(result: ActionResult) -> int:
    return len(result.stdout) + len(result.stderr)
