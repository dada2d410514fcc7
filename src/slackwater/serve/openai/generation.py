"""One OpenAI-style generation: submits turns, streams tokens, cancels when the client leaves."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from starlette.types import Receive

from slackwater.model.ids import JobId, TenantId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.runtime.executors.engines import TurnResult, TurnTokens
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.http.errors import FailedTurnError

_AT_ONCE = 4  # more are begun or stopped in slices
_LOOK_EVERY_S = 2.0
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


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One choice: its prompt, how to sample, and with which weights."""

    prompt: Sequence[int]
    sampling: Sampling
    base_model: str
    version: str
    job: JobId


class Generation:
    """All choices of one request: `begin`, read, `close`, which cancels what still runs."""

    def __init__(
        self,
        plane: ControlPlane,
        tenant: TenantId,
        choices: Sequence[ChoiceRequest],
        *,
        stream: bool,
        arrived_s: float | None = None,
    ) -> None:
        self._arrived_s = arrived_s
        self._plane = plane
        self._tenant = tenant
        self._name = f"gen-{secrets.token_hex(12)}"
        self._choices = choices
        self._stream = stream
        self._heard: deque[ChoiceDelta | FinishedChoice | str] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._open = set(range(len(choices)))
        self._running: set[int] = set()

    async def begin(self) -> None:
        """Submit every choice; others get the event loop in between."""
        self._refuse_broken()
        self._plane.shares.check(self._tenant, len(self._choices), "prompts x n")
        self._plane.shares.take(self._tenant, len(self._choices))
        self._running = set(range(len(self._choices)))
        if len(self._choices) <= _AT_ONCE:
            for place in range(len(self._choices)):
                self._submit(place)
        else:
            shares = self._plane.loop_shares
            await shares.each(self._tenant, range(len(self._choices)), self._submit)

    def _submit(self, place: int) -> None:
        asked = self._choices[place]
        spec = TurnSpec(
            turn=self._turn(place),
            trajectory=TrajectoryId(self._turn(place)),
            job=asked.job,
            base_model=asked.base_model,
            prompt=asked.prompt,
            sampling=asked.sampling,
            version=asked.version,
            stream=self._stream,
            owner=self._tenant,
        )
        self._plane.rollout.submit(spec, _Choice(place, self), self._arrived_s)

    def _refuse_broken(self) -> None:
        """Fail if no engine of a model can start, instead of waiting for one."""
        for model in {asked.base_model for asked in self._choices}:
            if (why := self._plane.broken_engine(model, self._tenant)) is not None:
                raise FailedTurnError(why)

    def close(self) -> None:
        """Cancel what still runs; others get the event loop in between where that is much."""
        left = sorted(self._running, reverse=True)  # the last ones wait: they are cheap to stop
        shares = self._plane.loop_shares
        if len(left) > _AT_ONCE or (left and shares.waits(self._tenant)):
            self._plane.background.spawn(shares.each(self._tenant, left, self._cancel))
            return
        for place in left:
            self._cancel(place)

    def _cancel(self, place: int) -> None:
        if place in self._running:
            self._plane.rollout.cancel(self._turn(place))
            self._ended(place)

    def _ended(self, place: int) -> None:
        """Return the turn's share, even if nobody listened."""
        if place in self._running:
            self._running.discard(place)
            self._plane.shares.give_back(self._tenant, 1)

    def say(self, event: ChoiceDelta | FinishedChoice | str, place: int) -> None:
        """Record an event of one turn."""
        if not isinstance(event, ChoiceDelta):
            self._ended(place)
        self._heard.append(event)
        self._wake()

    async def until_gone(self, receive: Receive) -> None:
        """End `events` when the client leaves, in the tenant's turn: many may leave at once."""
        while (await receive())["type"] != "http.disconnect":
            pass
        await self._plane.loop_shares.turn(self._tenant)
        self._open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _turn(self, place: int) -> TurnId:
        return TurnId(f"{self._name}/{place}")

    async def events(self) -> AsyncIterator[ChoiceDelta | FinishedChoice]:
        """Yield until every choice is complete; tokens that queued up come as one piece."""
        shares = self._plane.loop_shares
        while self._open:
            if not self._heard:
                await self._something_heard()
            if self._stream and shares.waits(self._tenant):
                await shares.turn(self._tenant)
            if not self._heard:
                self._refuse_broken()
                continue
            began_s = time.perf_counter()
            event = self._next()
            if isinstance(event, str):
                raise FailedTurnError(event)
            if isinstance(event, FinishedChoice):
                self._open.discard(event.choice)
            yield event
            if self._stream:  # what was written of it, too, unless the client was slow to take it
                took_s = time.perf_counter() - began_s
                shares.spent(self._tenant, min(took_s, _MOST_WRITING_S))

    async def _something_heard(self) -> None:
        """Or nothing for a while."""
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        looking = loop.call_later(_LOOK_EVERY_S, self._wake)
        try:
            await self._waiting
        finally:
            looking.cancel()
            self._waiting = None

    def _next(self) -> ChoiceDelta | FinishedChoice | str:
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
        complete = len(found) == len(self._choices)
        return [found[place] for place in sorted(found)] if complete else None


class _Choice:
    """The listener of one turn."""

    def __init__(self, place: int, generation: Generation) -> None:
        self._place = place
        self._generation = generation

    def appended(self, more: TurnTokens) -> None:
        self._generation.say(ChoiceDelta(self._place, more), self._place)

    def completed(self, result: TurnResult) -> None:
        self._generation.say(FinishedChoice(self._place, result), self._place)

    def failed(self, error: str) -> None:
        self._generation.say(error, self._place)
