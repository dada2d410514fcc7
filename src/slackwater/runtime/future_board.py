"""Futures: who waits for which request, and the outcomes that came last.

An outcome is told only after it is durable. Any number of waiters may wait for one request, and an
outcome can be read again until it is acknowledged or expires.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from slackwater.model.ids import RequestId
from slackwater.model.operation import FaultOwner

_REMEMBERED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: `result` is bytes that its `kind` explains, or `error` says why not."""

    kind: str
    result: bytes | None
    error: str | None = None
    owner: FaultOwner | None = None


class FutureBoard:
    """Outcomes by request id, in memory; the store has all of them."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, asyncio.Event] = {}
        self._recent: OrderedDict[RequestId, Outcome] = OrderedDict()
        self._recent_bytes = 0

    def expect(self, request: RequestId) -> None:
        """The request is under way."""
        self._waiting.setdefault(request, asyncio.Event())

    def pending(self, request: RequestId) -> bool:
        return request in self._waiting

    def settle(self, request: RequestId, outcome: Outcome) -> None:
        """The outcome is durable: wake everybody."""
        self._recent[request] = outcome
        self._recent_bytes += _size_bytes(outcome)
        while self._recent_bytes > _REMEMBERED_BYTES and len(self._recent) > 1:
            _, oldest = self._recent.popitem(last=False)
            self._recent_bytes -= _size_bytes(oldest)
        event = self._waiting.pop(request, None)
        if event is not None:
            event.set()

    def recent(self, request: RequestId) -> Outcome | None:
        return self._recent.get(request)

    async def wait(self, request: RequestId, hold_s: float) -> bool:
        """Whether the request was settled within `hold_s`."""
        event = self._waiting.get(request)
        if event is None:
            return True
        try:
            async with asyncio.timeout(hold_s):
                await event.wait()
        except TimeoutError:
            return False
        return True


def _size_bytes(outcome: Outcome) -> int:
    """With something for what is kept around it."""
    return 512 + len(outcome.result or b"") + len(outcome.error or "")
