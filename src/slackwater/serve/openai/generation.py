"""One OpenAI-style generation: asks for choices, streams tokens, ends when the client leaves."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from starlette.types import Receive

from slackwater.model.errors import SlackwaterError
from slackwater.model.ids import TenantId
from slackwater.runtime.executors.turn_results import TurnResult, TurnTokens
from slackwater.serve.front.gateway import ChoicesRequest, Gateway

_MOST_WRITING_S = 0.002  # of the loop for one piece; more is waiting


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """Some tokens of one choice."""

    choice: int
    more: TurnTokens


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A choice that is complete."""

    choice: int
    result: TurnResult


class Generation:
    """All choices of one request: `begin`, read, `close`, which gives up what still runs."""

    def __init__(
        self,
        gateway: Gateway,
        tenant: TenantId,
        asked: ChoicesRequest,
        *,
        stream: bool,
        arrived_s: float | None = None,
    ) -> None:
        self._arrived_s = arrived_s
        self._gateway = gateway
        self._tenant = tenant
        self._asked = asked
        self._stream = stream
        self._heard: deque[ChoiceDelta | FinishedChoice | SlackwaterError] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._open = set(range(asked.choices))
        self._numbers: list[int] = []

    async def begin(self) -> None:
        """Have every choice generated; of those that stream it returns when they are accepted."""
        listeners = [_Choice(place, self) for place in range(self._asked.choices)]
        self._numbers = await self._gateway.generate(
            self._tenant,
            self._asked,
            listeners,
            stream=self._stream,
            arrived_s=self._arrived_s,
        )

    def close(self) -> None:
        """Give up what still runs."""
        self._gateway.abandon(self._tenant, self._numbers)

    def say(self, event: ChoiceDelta | FinishedChoice | SlackwaterError) -> None:
        """Record an event of one choice."""
        self._heard.append(event)
        self._wake()

    async def until_gone(self, receive: Receive) -> None:
        """End `events` when the client leaves, in the tenant's turn: many may leave at once."""
        while (await receive())["type"] != "http.disconnect":
            pass
        await self._gateway.loop_shares.turn(self._tenant)
        self._open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def events(self) -> AsyncIterator[ChoiceDelta | FinishedChoice]:
        """Yield until every choice is complete; tokens that queued up come as one piece."""
        shares = self._gateway.loop_shares
        while self._open:
            if not self._heard:
                await self._something_heard()
            if self._stream:
                await shares.turn(self._tenant)
            if not self._heard:
                continue
            began_s = time.thread_time()
            event = self._next()
            if isinstance(event, SlackwaterError):
                raise event
            if isinstance(event, FinishedChoice):
                self._open.discard(event.choice)
            yield event
            if self._stream:  # what was written of it, too, unless the client was slow to take it
                took_s = time.thread_time() - began_s
                shares.spent(self._tenant, min(took_s, _MOST_WRITING_S))

    async def _something_heard(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _next(self) -> ChoiceDelta | FinishedChoice | SlackwaterError:
        """The next event, merged with queued tokens of the same choice."""
        heard = self._heard
        event = heard.popleft()
        if not isinstance(event, ChoiceDelta) or not heard:
            return event
        parts = [event.more]
        while heard and isinstance(more := heard[0], ChoiceDelta) and more.choice == event.choice:
            parts.append(more.more)
            heard.popleft()
        if len(parts) == 1:
            return event
        joined = replace(
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
        complete = len(found) == self._asked.choices
        return [found[place] for place in sorted(found)] if complete else None


class _Choice:
    """The listener of one turn."""

    __slots__ = ("_generation", "_place")

    def __init__(self, place: int, generation: Generation) -> None:
        self._place = place
        self._generation = generation

    def appended(self, more: TurnTokens) -> None:
        self._generation.say(ChoiceDelta(self._place, more))

    def completed(self, result: TurnResult) -> None:
        self._generation.say(FinishedChoice(self._place, result))

    def failed(self, error: SlackwaterError) -> None:
        self._generation.say(error)
