"""Requests of each sampling session in the order they finished, for clients that poll by session.

A cursor is a moment in microseconds, made unique: it stays good over a restart of the service.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from slackwater.model.ids import RequestId, SamplingSessionId


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """`size_bytes` is None where there is no result: the request failed, or it was acknowledged."""

    request: RequestId
    finished_s: float
    size_bytes: int | None


class FinishedRequestFeed:
    """In memory; rebuilt from the store at start."""

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
        """These were read: they need not be told again."""
        told = self._finished.get(session, {})
        for cursor in [c for c, finished in told.items() if finished.request in requests]:
            del told[cursor]

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
            try:
                async with asyncio.timeout(hold_s):
                    await news.wait()
            except TimeoutError:
                return [], cursor
            found = self._after(session, cursor)
        return list(found.values()), max(found, default=cursor)

    def close(self) -> None:
        """Let everybody go who waits."""
        self._closed = True
        for news in self._news.values():
            news.set()

    def _after(self, session: SamplingSessionId, cursor: int) -> dict[int, FinishedRequest]:
        told = self._finished.get(session, {})
        return {place: finished for place, finished in told.items() if place > cursor}
