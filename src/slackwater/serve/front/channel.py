"""The control plane's end of the channels: what front ends ask, each tenant in turn.

Records of a tenant are handled in order, and tenants in turn (`TenantQueues`). A front end that
goes takes its generations with it; samples that it has handed over go on.
"""

import asyncio
import logging
import secrets
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from slackwater.model.errors import ConfigError, SlackwaterError
from slackwater.model.ids import JobId, RequestId, TenantId, TrajectoryId, TurnId
from slackwater.model.turn import TurnSpec
from slackwater.runtime.executors.turn_results import TurnResult, TurnTokens
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.future_board import RequestOutcome
from slackwater.serve.front.connection import ChannelConnection
from slackwater.serve.http.errors import FailedTurnError, status_of
from slackwater.serve.openai.models import ModelNames
from slackwater.wire import front as wire
from slackwater.wire.frames import FrameError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
_encode = msgspec.msgpack.Encoder().encode


class FrontChannel:
    """All front ends of a control plane."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.names = ModelNames(plane)
        self._fronts: set[_Front] = set()
        self._watching: asyncio.TimerHandle | None = None
        self._is_open = False

    def open(self) -> None:
        """The control plane can be asked: tell front ends what they must know to serve."""
        self._is_open = True
        for front in self._fronts:
            self.joined(front)

    def joined(self, front: "_Front") -> None:
        if self._is_open:
            front.connection.send(self._setup())

    def connect(self) -> asyncio.Protocol:
        """A new front end's connection."""
        front = _Front(self)
        self._fronts.add(front)
        return front.connection

    def _setup(self) -> wire.Setup:
        settings = self.plane.settings
        return wire.Setup(
            dict(self.plane.tenants.keys()),
            {base.name: str(base.directory) for base in self.plane.bases},
            settings.host,
            list(settings.allowed_hosts),
            settings.max_body_bytes,
            self.plane.shares.share,
            settings.hold_s,
            settings.tenants[0],
        )

    def stop(self) -> None:
        """Have every front end answer what is under way, and end."""
        for front in self._fronts:
            front.send(wire.StopServing())

    def close(self) -> None:
        for front in tuple(self._fronts):
            front.connection.close()
        if self._watching is not None:
            self._watching.cancel()

    def gone(self, front: "_Front") -> None:
        self._fronts.discard(front)

    # ---- engines that cannot start ----
    def watch(self) -> None:
        """Look now and then whether something can still be generated, while anybody waits."""
        if self._watching is None:
            loop = asyncio.get_running_loop()
            self._watching = loop.call_later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._watching = None
        turns = [turn for front in self._fronts for turn in front.turns.values()]
        found: dict[tuple[str, TenantId], str | None] = {}
        for turn in turns:
            place = turn.base_model, turn.tenant
            if place not in found:
                found[place] = self.plane.broken_engine(*place)
            if (why := found[place]) is not None:
                self.plane.rollout.cancel(turn.name)
                turn.failed(why)
        if turns:
            self.watch()


class _Front:
    """One front end."""

    def __init__(self, channel: FrontChannel) -> None:
        self._channel = channel
        self._plane = channel.plane
        self._name = f"gen-{secrets.token_hex(12)}"
        self._tenants = frozenset(channel.plane.tenants.names())
        self._is_open = True
        self.turns: dict[int, _Choice] = {}
        self._unsent = _no_tokens()
        self._told = self._plane.queues.shares.totals.copy()
        self.connection = _Told(self, channel.joined)

    def heard(self, body: bytes) -> None:
        """A frame; FrameError closes the connection."""
        for record in wire.decode_from_front(body):
            if record.tenant not in self._tenants:
                raise FrameError(f"tenant {record.tenant[:100]!r} is not known here")
            if isinstance(record, wire.Abandon):
                self._forget(record.numbers)
            self._plane.queues.put(TenantId(record.tenant), self._steps(record))

    def lost(self) -> None:
        """Nobody reads what it has asked for."""
        self._channel.gone(self)
        logger.warning("a front end has gone turns=%d", len(self.turns))
        self._is_open = False
        for turn in self.turns.values():
            self._plane.queues.put(turn.tenant, self._abandon([turn.number]))

    def send(self, record: wire.Record) -> None:
        self.gather()
        self.connection.send(record)

    def refuse(self, number: int, error: SlackwaterError) -> None:
        self.send(wire.Refused(number, status_of(error), str(error)))

    # ---- what it asks ----
    def _steps(self, record: wire.FromFront) -> Iterator[None]:
        if isinstance(record, wire.Abandon):
            yield from self._abandon(record.numbers)
            return
        try:
            match record:
                case wire.GenerateChoices():
                    yield from self._generate(record)
                case wire.Sample():
                    self._sample(record)
                case wire.AskSession(number, tenant, name):
                    found = self._plane.sampling.session(TenantId(tenant), name)
                    self.send(wire.SessionFound(number, found))
                case wire.AskModel() | wire.AskFuture():
                    self._plane.background.spawn(self._answer(record))
        except SlackwaterError as error:
            self.refuse(record.number, error)

    def _generate(self, asked: wire.GenerateChoices) -> Iterator[None]:
        plane, tenant, count = self._plane, TenantId(asked.tenant), len(asked.prompts) * asked.n
        if any(len(prompt) % 4 or not prompt for prompt in asked.prompts):
            raise ConfigError.of("prompt", "bytes", "must be whole tokens, at least one")
        if count < 1 or len(asked.max_tokens) != len(asked.prompts):
            raise ConfigError.of("n", asked.n, "must be positive, and max_tokens of each prompt")
        plane.shares.check(tenant, count, "prompts x n")
        numbers = range(asked.number, asked.number + count)
        if any(number in self.turns for number in numbers):
            raise ConfigError.of("number", asked.number, "must be a new one")
        if not self._is_open:
            return
        if (why := self._broken(asked.base_model, tenant)) is not None:
            raise FailedTurnError(why)
        plane.shares.take(tenant, count)
        plane.jobs.seen(JobId(asked.job), tenant)
        self._channel.watch()
        for number in numbers:
            name = TurnId(f"{self._name}/{number}")
            self.turns[number] = _Choice(self, number, name, tenant, asked.base_model)
        if asked.stream:  # another's tokens say it
            self.send(wire.Accepted(asked.number))
        for place, number in enumerate(numbers):
            if (turn := self.turns.get(number)) is not None:
                self._submit(asked, turn, place)
                yield

    def _broken(self, base_model: str, tenant: TenantId) -> str | None:
        self._plane.bases.get(base_model)
        return self._plane.broken_engine(base_model, tenant)

    def _submit(self, asked: wire.GenerateChoices, turn: "_Choice", place: int) -> None:
        turn.is_submitted = True
        prompt = array("I")
        prompt.frombytes(asked.prompts[place // asked.n])
        spec = TurnSpec(
            turn=turn.name,
            trajectory=TrajectoryId(turn.name),
            job=JobId(asked.job),
            base_model=asked.base_model,
            prompt=prompt,
            sampling=asked.sampling_of(place),
            version=asked.version,
            stream=asked.stream,
            owner=turn.tenant,
        )
        self._plane.rollout.submit(spec, turn, asked.arrived_s)

    def _abandon(self, numbers: list[int]) -> Iterator[None]:
        for number in sorted(numbers, reverse=True):  # the last wait: cheap to stop
            if (turn := self.turns.get(number)) is not None:
                self._plane.rollout.cancel(turn.name)
                self.ended(turn)
                yield

    def _forget(self, numbers: list[int]) -> None:
        """Those that were not begun yet need not be, nor be stopped in their tenant's turn."""
        for number in numbers:
            if (turn := self.turns.get(number)) is not None and not turn.is_submitted:
                self.ended(turn)

    def ended(self, turn: "_Choice") -> None:
        """Return the turn's share, whoever ended it."""
        if self.turns.pop(turn.number, None) is not None:
            self._plane.shares.give_back(turn.tenant, 1)

    def _sample(self, asked: wire.Sample) -> None:
        plane, tenant = self._plane, TenantId(asked.tenant)
        session = plane.sampling.session(tenant, asked.sampling_session)
        plane.sessions.seen(session.session, loop_time())
        if (why := plane.broken_engine(session.base_model, tenant)) is not None:
            raise FailedTurnError(why)

        def told(request: RequestId | SlackwaterError, new: bool) -> None:
            if isinstance(request, SlackwaterError):
                self.refuse(asked.number, request)
            else:
                self.send(wire.Sampled(asked.number, request, new))

        over = partial(self._outcome, None)
        plane.sampling.take(session, asked.seq, asked.payload, told, over)

    def _outcome(self, number: int | None, request: RequestId, how: RequestOutcome) -> None:
        owner = None if how.owner is None else how.owner.value
        self.send(wire.FutureSettled(number, request, str(how.kind), how.result, how.error, owner))

    async def _answer(self, asked: wire.AskModel | wire.AskFuture) -> None:
        tenant = TenantId(asked.tenant)
        try:
            if isinstance(asked, wire.AskModel):
                base, version = await self._channel.names.weights(tenant, asked.name)
                self.send(wire.ModelFound(asked.number, base.name, version))
                return
            request = RequestId(asked.request)
            how = await self._plane.outcome(tenant, request, asked.hold_s)
            if how is None:
                self.send(wire.Pending(asked.number, self._plane.why_paused(request)))
            else:
                self._outcome(asked.number, request, how)
        except SlackwaterError as error:
            self.refuse(asked.number, error)

    # ---- what it is told of turns ----
    def said(self, turn: "_Choice", more: TurnTokens) -> None:
        if more.topk or more.prompt_logprobs is not None:
            self.send(wire.MoreTokens(turn.number, _encode(more)))
            return
        self.streamed(turn.number, more.tokens, more.logprobs)

    def streamed(self, number: int, some: Sequence[int], scores: Sequence[float]) -> None:
        """Goes with all other tokens of a few milliseconds, as columns."""
        numbers, counts, tokens, logprobs = self._unsent
        if not numbers:
            self.connection.due_soon()
        numbers.append(number)
        counts.append(len(some))
        tokens.extend(some)
        logprobs.extend(scores)

    def tell_spent(self) -> None:
        """With what is written anyway: what the control plane did for tenants."""
        spent = self._plane.queues.shares.totals
        if spent != self._told:
            told = ((name, seconds - self._told[name]) for name, seconds in spent.items())
            self.connection.put(wire.Spent({name: since for name, since in told if since}))
            self._told = spent.copy()

    def gather(self) -> None:
        """Before all else: a choice's tokens come before its end."""
        if self._unsent[0]:
            columns, self._unsent = self._unsent, _no_tokens()
            self.connection.put(wire.Tokens(*(column.tobytes() for column in columns)))


def _no_tokens() -> "tuple[array[int], array[int], array[int], array[float]]":
    return array("Q"), array("I"), array("I"), array("f")


class _Told(ChannelConnection):
    """The connection of a front end, which is told first what it must know."""

    def __init__(self, front: _Front, joined: Callable[[_Front], None]) -> None:
        super().__init__(front.heard, front.lost, gather_s=0.0)
        self._front, self._joined = front, joined

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._joined(self._front)

    def flush(self) -> None:
        self._front.gather()
        self._front.tell_spent()
        super().flush()


class _Choice:
    """The listener of one turn of a front end."""

    __slots__ = ("base_model", "front", "is_submitted", "name", "number", "tenant")

    def __init__(
        self, front: _Front, number: int, name: TurnId, tenant: TenantId, base_model: str
    ) -> None:
        self.front, self.number, self.name = front, number, name
        self.tenant, self.base_model, self.is_submitted = tenant, base_model, False

    def appended(self, more: TurnTokens) -> None:
        self.front.said(self, more)

    def streamed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.front.streamed(self.number, tokens, logprobs)

    def completed(self, result: TurnResult) -> None:
        self.front.ended(self)
        self.front.send(wire.Completed(self.number, _encode(result)))

    def failed(self, error: str) -> None:
        self.front.ended(self)
        self.front.send(wire.Failed(self.number, error))
