"""Outcomes of requests: told only once they are durable, and kept for those who wait for them.

`WriteAhead` writes to the durable log before the callbacks that depend on it run. Any number of
waiters may wait for one request on the `FutureBoard`, and an outcome can be read again until it is
acknowledged or expires. A client polls the `FinishedRequestFeed` of its sampling session by a
cursor, a unique time in microseconds, which stays valid across a restart of the service.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from slackwater.model.ids import RequestId, SamplingSessionId, TenantId
from slackwater.model.operation import FaultOwner, OpStatus
from slackwater.runtime.net.background import Background, wait_until_set

if TYPE_CHECKING:  # a front end has no database
    from slackwater.runtime.store.database import Store, Write

Tell: TypeAlias = Callable[[], None]

_REMEMBERED_BYTES = 64 << 20
_REMEMBERED = 2000
_DONE, _FAILED = OpStatus.DONE.value, OpStatus.FAILED.value


class RequestOutcome(msgspec.Struct, frozen=True):
    """How a request ended: `result` is bytes that its `kind` explains, or `error` says why not."""

    kind: str
    result: bytes | None
    error: str | None = None
    owner: FaultOwner | None = None

    def columns(self, now_s: float) -> dict[str, object]:
        """What changes in the row of a request that ended so."""
        return {
            "status": _DONE if self.error is None else _FAILED,
            "finished_s": now_s,
            "result": self.result,
            "error": self.error,
            "owner": None if self.owner is None else self.owner.value,
        }


class FutureBoard:
    """Requests under way and the outcomes that came last, in memory; the store has all of them."""

    def __init__(
        self, on_settle: Callable[[TenantId, str, float, bool], None] = lambda *told: None
    ) -> None:
        """`on_settle` is called for every outcome: tenant, kind, seconds, and whether it failed."""
        self._on_settle = on_settle
        self._since_s: dict[RequestId, float] = {}
        self._waiting: dict[RequestId, asyncio.Event | None] = {}  # None: nobody waits here
        self._recent: OrderedDict[RequestId, RequestOutcome] = OrderedDict()
        self._recent_bytes = 0
        self._tenants: dict[RequestId, TenantId] = {}
        self.is_closed = False  # the service stops, so that nobody may wait any more

    def expect(self, request: RequestId, tenant: TenantId) -> None:
        self._waiting.setdefault(request)
        self._tenants[request] = tenant
        self._since_s.setdefault(request, time.monotonic())

    def settle(self, request: RequestId, outcome: RequestOutcome) -> None:
        """The outcome is durable: wake everybody."""
        since_s, tenant = self._since_s.pop(request, None), self._tenants.get(request)
        if since_s is not None and tenant is not None:
            took_s, failed = time.monotonic() - since_s, outcome.error is not None
            self._on_settle(tenant, str(outcome.kind), took_s, failed)
        self._recent[request] = outcome
        self._recent_bytes += _size_bytes(outcome)
        while len(self._recent) > 1 and (
            self._recent_bytes > _REMEMBERED_BYTES or len(self._recent) > _REMEMBERED
        ):
            self._forget(next(iter(self._recent)))
        event = self._waiting.pop(request, None)
        if event is not None:
            event.set()

    def forget(self, requests: Iterable[RequestId]) -> None:
        """Their outcomes were acknowledged or have expired."""
        for request in requests:
            if request in self._recent:
                self._forget(request)

    def _forget(self, request: RequestId) -> None:
        self._recent_bytes -= _size_bytes(self._recent.pop(request))
        self._tenants.pop(request, None)

    def tenant_of(self, request: RequestId) -> TenantId | None:
        return self._tenants.get(request)

    def recent(self, request: RequestId) -> RequestOutcome | None:
        return self._recent.get(request)

    async def wait(self, request: RequestId, hold_s: float) -> bool:
        """Whether the request was settled within `hold_s`, or before the board was closed."""
        if request not in self._waiting:
            return True
        if not self.is_closed:
            event = self._waiting[request]
            if event is None:
                event = self._waiting[request] = asyncio.Event()
            await wait_until_set(event, hold_s)
        return request not in self._waiting

    def close(self) -> None:
        """Release all waiters: the service stops, and their requests continue after its restart."""
        self.is_closed = True
        for event in self._waiting.values():
            if event is not None:
                event.set()


def _size_bytes(outcome: RequestOutcome) -> int:
    """Bytes of an outcome, with an estimate of the objects around it."""
    return 512 + len(outcome.result or b"") + len(outcome.error or "")


class FinishedRequest(msgspec.Struct, frozen=True):
    """`size_bytes` is None where there is no result: the request failed, or it was acknowledged."""

    request: RequestId
    finished_s: float
    size_bytes: int | None


class FinishedRequestFeed:
    """Finished requests by session, in memory; rebuilt from the store at start."""

    def __init__(self) -> None:
        self._finished: dict[SamplingSessionId, dict[int, FinishedRequest]] = {}
        self._news: dict[SamplingSessionId, asyncio.Event] = {}
        self._cursor = 0
        self._closed = False

    def add(self, session: SamplingSessionId, finished: FinishedRequest) -> None:
        self._cursor = max(self._cursor + 1, int(finished.finished_s * 1e6))
        self._finished.setdefault(session, {})[self._cursor] = finished
        if session in self._news:
            self._news[session].set()

    def acknowledge(self, session: SamplingSessionId, requests: Collection[RequestId]) -> None:
        by_cursor = self._finished.get(session, {})
        for cursor in [c for c, finished in by_cursor.items() if finished.request in requests]:
            del by_cursor[cursor]

    def drop(self, session: SamplingSessionId) -> None:
        self._finished.pop(session, None)
        self._news.pop(session, None)

    async def after(
        self, session: SamplingSessionId, cursor: int, hold_s: float
    ) -> tuple[list[FinishedRequest], int]:
        """What finished after `cursor`, and the cursor after it; waits for something to finish."""
        found = self._after(session, cursor)
        if not found and not self._closed:
            news = self._news[session] = asyncio.Event()
            if not await wait_until_set(news, hold_s):
                return [], cursor
            found = self._after(session, cursor)
        return list(found.values()), max(found, default=cursor)

    def close(self) -> None:
        """Wake every waiter."""
        self._closed = True
        for news in self._news.values():
            news.set()

    def _after(self, session: SamplingSessionId, cursor: int) -> dict[int, FinishedRequest]:
        by_cursor = self._finished.get(session, {})
        return {place: finished for place, finished in by_cursor.items() if place > cursor}


class WriteAhead:
    """A queue of writes, each with the callback that runs after it.

    Writes of one round of the event loop are one transaction: an action that ends and the one that
    takes its cores wait for a single write. Then the callbacks run in order.
    """

    def __init__(self, store: "Store", background: Background) -> None:
        self._store = store
        self._background = background
        self._queue: list[tuple[Write | None, Tell]] = []
        self._under_way = False

    def then(self, tell: Tell, write: "Write | None" = None) -> None:
        """Write, then call `tell`; without a write, call it now unless others are queued."""
        if write is None and not self._under_way:
            tell()
            return
        self._queue.append((write, tell))
        if not self._under_way:
            self._under_way = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Write here if the store is idle, as it usually is; else on its thread."""
        batch, self._queue = self._queue, []
        writes, tells = [write for write, _ in batch if write], [tell for _, tell in batch]
        try:
            if self._store.try_write_now(writes):
                self._run_callbacks(tells)
            else:
                self._background.spawn(self._wait(writes, tells))
        except Exception as error:  # noqa: BLE001  (it takes the service down, as that of a task does)
            self._background.spawn(_raise(error))

    async def _wait(self, writes: "Sequence[Write]", tells: Sequence[Tell]) -> None:
        await self._store.write(writes)
        self._run_callbacks(tells)

    def _run_callbacks(self, tells: Sequence[Tell]) -> None:
        for tell in tells:
            tell()
        self._under_way = bool(self._queue)
        if self._queue:
            asyncio.get_running_loop().call_soon(self._begin)


async def _raise(error: Exception) -> None:
    raise error
