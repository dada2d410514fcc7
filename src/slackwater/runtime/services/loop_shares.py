"""Many small things to be done on the event loop for one tenant: in slices, one of the tenant's requests at a time.

A slice is short, and the tenant rests after it for twice as long as it took: at most a third of the loop's time goes to one tenant's slices,
however many requests it has under way. Where there is one tenant it only lets its own other requests go between.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeVar

from slackwater.model.ids import TenantId

T = TypeVar("T")

SLICE_S = 0.0003
_REST = 2.0  # slices


class LoopShares:
    """Use from the event loop's thread alone."""

    def __init__(self, tenants: int, slice_s: float = SLICE_S) -> None:
        self._several = tenants > 1
        self._slice_s = slice_s
        self._turns: defaultdict[TenantId, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def each(self, tenant: TenantId, items: Iterable[T], work: Callable[[T], object]) -> None:
        """`work` on every item, in order."""
        left, more = iter(items), True
        while more:
            async with self._turns[tenant]:
                began_s = time.perf_counter()
                more = self._slice(left, work, began_s + self._slice_s)
                took_s = time.perf_counter() - began_s
                await asyncio.sleep(_REST * took_s if self._several and more else 0)

    @staticmethod
    def _slice(left: Iterable[T], work: Callable[[T], object], until_s: float) -> bool:
        """Whether some may be left."""
        for item in left:
            work(item)
            if time.perf_counter() >= until_s:
                return True
        return False
