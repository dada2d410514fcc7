"""One OpenAI-style generation: requests choices, streams tokens, ends if the client leaves."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from msgspec import structs
from starlette.types import Receive

from slackwater.model.errors import SlackwaterError
from slackwater.model.ids import TenantId
from slackwater.runtime.executors.turn_results import TurnResult, TurnTokens
from slackwater.serve.front.gateway import Gateway
from slackwater.wire.front import GenerateChoices

_MAX_WRITE_S = 0.002  # of loop time per piece; more means that the client reads slowly


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """Some tokens of one choice."""

    choice: int
    more: TurnTokens


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    choice: int
    result: TurnResult


class Generation:
    """All choices of one request: `begin`, read `events` or `results`, `close`."""

    def __init__(self, gateway: Gateway, request: GenerateChoices) -> None:
        self._gateway = gateway
        self._request = request
        self._tenant = TenantId(request.tenant)
        self._queue: deque[ChoiceDelta | FinishedChoice | SlackwaterError] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._open = set(range(request.count))
        self._numbers: list[int] = []

    async def begin(self) -> None:
        """Request every choice; a streaming request returns once it is accepted."""
        listeners = [_Choice(place, self) for place in range(self._request.count)]
        self._numbers = await self._gateway.generate(self._request, listeners)

    def close(self) -> None:
        """Cancel choices that still run."""
        self._gateway.abandon(self._tenant, self._numbers)

    def push(self, event: ChoiceDelta | FinishedChoice | SlackwaterError) -> None:
        """Record an event of one choice."""
        self._queue.append(event)
        self._wake()

    async def until_gone(self, receive: Receive) -> None:
        """End `events` when the client leaves, in the tenant's turn: many may leave together."""
        while (await receive())["type"] != "http.disconnect":
            pass
        await self._gateway.loop_shares.wait_turn(self._tenant)
        self._open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def events(self) -> AsyncIterator[ChoiceDelta | FinishedChoice]:
        """Yield until every choice is complete; queued tokens of a choice are merged."""
        shares = self._gateway.loop_shares
        while self._open:
            if not self._queue:
                await self._wait_for_event()
            if self._request.stream:
                await shares.wait_turn(self._tenant)
            if not self._queue:
                continue
            began_s = time.thread_time()
            event = self._next()
            if isinstance(event, SlackwaterError):
                raise event
            if isinstance(event, FinishedChoice):
                self._open.discard(event.choice)
            yield event
            if self._request.stream:  # charge the time of writing it, but not a slow client's
                took_s = time.thread_time() - began_s
                shares.charge(self._tenant, min(took_s, _MAX_WRITE_S))

    async def _wait_for_event(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _next(self) -> ChoiceDelta | FinishedChoice | SlackwaterError:
        """The next event, merged with queued tokens of the same choice."""
        queue = self._queue
        event = queue.popleft()
        if not isinstance(event, ChoiceDelta) or not queue:
            return event
        parts = [event.more]
        while queue and isinstance(more := queue[0], ChoiceDelta) and more.choice == event.choice:
            parts.append(more.more)
            queue.popleft()
        if len(parts) == 1:
            return event
        joined = structs.replace(
            event.more,
            tokens=[token for part in parts for token in part.tokens],
            logprobs=[value for part in parts for value in part.logprobs],
            topk=[row for part in parts for row in part.topk],
        )
        return ChoiceDelta(event.choice, joined)

    async def results(self) -> list[TurnResult] | None:
        """All choices, in order; None if the client left."""
        found = {
            event.choice: event.result
            async for event in self.events()
            if isinstance(event, FinishedChoice)
        }
        complete = len(found) == self._request.count
        return [found[place] for place in sorted(found)] if complete else None


class _Choice:
    """The listener of one turn."""

    __slots__ = ("_generation", "_place")

    def __init__(self, place: int, generation: Generation) -> None:
        self._place = place
        self._generation = generation

    def on_tokens(self, more: TurnTokens) -> None:
        self._generation.push(ChoiceDelta(self._place, more))

    def on_complete(self, result: TurnResult) -> None:
        self._generation.push(FinishedChoice(self._place, result))

    def on_failure(self, error: SlackwaterError) -> None:
        self._generation.push(error)
