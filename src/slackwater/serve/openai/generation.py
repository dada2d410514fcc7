"""One OpenAI-style generation: turns submitted, followed token by token, cancelled when nobody listens."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from slackwater.model.errors import UnavailableError
from slackwater.model.ids import JobId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.runtime.bodies.rollout import TurnResult
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.http.errors import FailedTurnError


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of one choice."""

    choice: int
    tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Whole:
    """A choice that is complete."""

    choice: int
    result: TurnResult


@dataclass(frozen=True, slots=True)
class Asked:
    """One choice: its prompt, how to sample, and with which weights."""

    prompt: Sequence[int]
    sampling: Sampling
    base_model: str
    version: str


class Generation:
    """All choices of one request. Use as a context manager: leaving it cancels what still runs."""

    def __init__(self, plane: ControlPlane, choices: Sequence[Asked], *, stream: bool) -> None:
        self._plane = plane
        self._name = f"gen-{secrets.token_hex(12)}"
        self._choices = choices
        self._stream = stream
        self._queue: asyncio.Queue[Piece | Whole | str] = asyncio.Queue()
        self._open = set(range(len(choices)))

    def __enter__(self) -> "Generation":
        limit = self._plane.settings.max_live_turns
        if self._plane.rollout.live() + len(self._choices) > max(limit, len(self._choices)):
            raise UnavailableError(f"{limit} turns are under way; try again")
        for place, asked in enumerate(self._choices):
            spec = TurnSpec(
                turn=self._turn(place),
                trajectory=TrajectoryId(self._turn(place)),
                job=JobId(asked.base_model),
                prompt=asked.prompt,
                sampling=asked.sampling,
                version=asked.version,
                stream=self._stream,
            )
            self._plane.rollout.submit(spec, _Choice(place, self._queue))
        return self

    def __exit__(self, *error: object) -> None:
        for place in self._open:
            self._plane.rollout.cancel(self._turn(place))

    def _turn(self, place: int) -> TurnId:
        return TurnId(f"{self._name}/{place}")

    async def events(self) -> AsyncIterator[Piece | Whole]:
        """Until every choice is whole; a failed turn raises."""
        while self._open:
            event = await self._queue.get()
            if isinstance(event, str):
                raise FailedTurnError(event)
            if isinstance(event, Whole):
                self._open.discard(event.choice)
            yield event

    async def results(self) -> list[TurnResult]:
        """All choices, in order."""
        found = {
            event.choice: event.result async for event in self.events() if isinstance(event, Whole)
        }
        return [found[place] for place in sorted(found)]


class _Choice:
    """The listener of one turn."""

    def __init__(self, place: int, queue: "asyncio.Queue[Piece | Whole | str]") -> None:
        self._place = place
        self._queue = queue

    def appended(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._queue.put_nowait(Piece(self._place, tokens, logprobs))

    def completed(self, result: TurnResult) -> None:
        self._queue.put_nowait(Whole(self._place, result))

    def failed(self, error: str) -> None:
        self._queue.put_nowait(error)
