"""The control plane's end of the channels to its front ends.

Records of one tenant are handled in order, tenants in turn (`TenantQueues`). When a front end dies
its generations are cancelled; samples that it has submitted continue.
"""

import asyncio
import logging
import secrets
from array import array
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from slackwater.model.errors import ConfigError, SlackwaterError
from slackwater.model.ids import JobId, RequestId, TenantId, TrajectoryId, TurnId
from slackwater.model.turn import TurnSpec
from slackwater.runtime.executors.turn_results import TurnResult, TurnTokens
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.outcomes import RequestOutcome
from slackwater.serve.front.connection import ChannelConnection
from slackwater.serve.http.errors import FailedTurnError, status_of
from slackwater.serve.openai.models import ModelNames
from slackwater.wire import front as wire
from slackwater.wire.frames import FrameError

logger = logging.getLogger(__name__)

_ENGINE_CHECK_S = 2.0
_encode = msgspec.msgpack.Encoder().encode


class FrontChannel:
    """All front ends of a control plane."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.names = ModelNames(plane)
        self._fronts: set[_Front] = set()
        self._watching: asyncio.TimerHandle | None = None
        self.is_open = False

    def open(self) -> None:
        """The control plane is ready: send every front end its setup."""
        self.is_open = True
        for front in self._fronts:
            front.send_setup()

    def connect(self) -> asyncio.Protocol:
        """A new front end's connection."""
        front = _Front(self)
        self._fronts.add(front)
        return front.connection

    def setup(self) -> wire.Setup:
        """What a front end needs before it serves."""
        settings = self.plane.settings
        return wire.Setup(
            dict(self.plane.tenants.keys()),
            {base.name: str(base.directory) for base in self.plane.bases},
            settings.host,
            list(settings.allowed_hosts),
            settings.max_body_bytes,
            self.plane.shares.share,
            settings.hold_s,
        )

    def stop(self) -> None:
        """Tell every front end to answer its open requests and end."""
        self.is_open = False
        for front in self._fronts:
            front.send(wire.StopServing())

    def close(self) -> None:
        for front in tuple(self._fronts):
            front.connection.close()
        if self._watching is not None:
            self._watching.cancel()

    def remove(self, front: "_Front") -> None:
        self._fronts.discard(front)

    # ---- engines that cannot start ----
    def watch(self) -> None:
        """Check every two seconds, while turns are open, that their models still have engines."""
        if self._watching is None:
            loop = asyncio.get_running_loop()
            self._watching = loop.call_later(_ENGINE_CHECK_S, self._check_engines)

    def _check_engines(self) -> None:
        self._watching = None
        turns = [turn for front in self._fronts for turn in front.turns.values()]
        reasons: dict[tuple[str, TenantId], str | None] = {}
        for turn in turns:
            key = turn.base_model, turn.tenant
            if key not in reasons:
                reasons[key] = self.plane.breakdowns.engine_failure(*key)
            if (why := reasons[key]) is not None:
                self.plane.rollout.cancel(turn.name)
                turn.fail(why)
        if turns:
            self.watch()


class _Front:
    """One front end: its open turns, and the shares that they take."""

    def __init__(self, channel: FrontChannel) -> None:
        self._channel = channel
        self._plane = channel.plane
        self._name = f"gen-{secrets.token_hex(12)}"
        self._tenants = frozenset(channel.plane.tenants.names())
        self._is_open = True
        self.turns: dict[int, _Choice] = {}
        # By the first number of a request: whose it is, and how many of its choices have a share
        # but are not submitted yet.
        self._waiting: dict[int, tuple[TenantId, int]] = {}
        self._unsent = _empty_columns()
        self._reported_spent = self._plane.queues.shares.totals.copy()
        self.connection = _FrontConnection(self)

    def send_setup(self) -> None:
        """Send the first record, once the control plane is ready."""
        if self._channel.is_open:
            self.connection.send(self._channel.setup())

    def receive_frame(self, body: bytes) -> None:
        """Queue a frame's records; FrameError closes the connection."""
        for record in wire.decode_from_front(body):
            if record.tenant not in self._tenants:
                raise FrameError(f"tenant {record.tenant[:100]!r} is not known here")
            tenant = TenantId(record.tenant)
            if isinstance(record, wire.GenerateChoices):
                if record.number in self._waiting:
                    raise FrameError(f"request {record.number} came twice")
                self._waiting[record.number] = tenant, 0
            elif isinstance(record, wire.AbandonChoices):
                self._forget_waiting(record.number)  # need not wait for the tenant's turn
            self._plane.queues.put(tenant, self._handle(record))

    def handle_disconnect(self) -> None:
        """Cancel its turns, whose results have no reader any more."""
        self._channel.remove(self)
        if self._channel.is_open:
            logger.warning("a front end has gone turns=%d", len(self.turns))
        self._is_open = False
        for turn in self.turns.values():
            self._plane.queues.put(turn.tenant, self._abandon(turn.number, 1))

    def send(self, record: wire.Record) -> None:
        if self._unsent[0]:
            self.gather()
        self.connection.send(record)

    def refuse(self, number: int, error: SlackwaterError) -> None:
        self.send(wire.RequestRefused(number, status_of(error), str(error)))

    # ---- requests of the front end ----
    def _handle(self, record: wire.FromFront) -> Iterator[None]:
        if isinstance(record, wire.AbandonChoices):
            yield from self._abandon(record.number, record.count)
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
            if isinstance(record, wire.GenerateChoices):
                self._forget_waiting(record.number)
            self.refuse(record.number, error)

    def _generate(self, message: wire.GenerateChoices) -> Iterator[None]:
        plane, tenant, first = self._plane, TenantId(message.tenant), message.number
        if first not in self._waiting:
            return  # it was abandoned before its turn came
        count = message.count
        if any(len(prompt) % 4 or not prompt for prompt in message.prompts):
            raise ConfigError.of("prompt", "bytes", "must be whole tokens, at least one")
        if count < 1 or len(message.max_tokens) != len(message.prompts):
            raise ConfigError.of("n", message.n, "must be positive, and max_tokens of each prompt")
        plane.shares.check(tenant, count, "prompts x n")
        if not self.turns.keys().isdisjoint(range(first, first + count)):
            raise ConfigError.of("number", first, "must be a new one")
        plane.bases.get(message.base_model)  # NotFoundError if there is none
        if (why := plane.breakdowns.engine_failure(message.base_model, tenant)) is not None:
            raise FailedTurnError(why)
        plane.shares.take(tenant, count)
        self._waiting[first] = tenant, count
        plane.jobs.record_activity(JobId(message.job), tenant)
        if message.stream:  # without streaming the result itself is the answer
            self.send(wire.ChoicesAccepted(first))
        for index in range(count):
            if index:
                yield
            if not self._is_open:
                self._forget_waiting(first)
            if first not in self._waiting:
                return
            self._submit(message, index)
        del self._waiting[first]

    def _submit(self, message: wire.GenerateChoices, index: int) -> None:
        number = message.number + index
        name, tenant = TurnId(f"{self._name}/{number}"), TenantId(message.tenant)
        spec = TurnSpec(
            turn=name,
            trajectory=TrajectoryId(name),
            job=JobId(message.job),
            base_model=message.base_model,
            prompt=array("I", message.prompts[index // message.n]),
            sampling=message.sampling_of(index),
            version=message.version,
            stream=message.stream,
            owner=tenant,
        )
        turn = self.turns[number] = _Choice(self, number, name, tenant, message.base_model)
        self._waiting[message.number] = tenant, self._waiting[message.number][1] - 1
        self._channel.watch()
        self._plane.rollout.submit(spec, turn, message.arrived_s)

    def _abandon(self, first: int, count: int) -> Iterator[None]:
        most = min(count, self._plane.shares.share)  # of one request
        for number in reversed(range(first, first + most)):  # the last ones are cheap to stop
            if (turn := self.turns.get(number)) is not None:
                self._plane.rollout.cancel(turn.name)
                self.release(turn)
                yield

    def _forget_waiting(self, number: int) -> None:
        """Drop the choices of a request that were not submitted yet, and return their share."""
        if (waiting := self._waiting.pop(number, None)) is not None:
            self._plane.shares.give_back(*waiting)

    def release(self, turn: "_Choice") -> None:
        """Forget a turn that has ended and return its share."""
        if self.turns.pop(turn.number, None) is not None:
            self._plane.shares.give_back(turn.tenant, 1)

    def _sample(self, message: wire.Sample) -> None:
        plane, tenant = self._plane, TenantId(message.tenant)
        session = plane.sampling.session(tenant, message.sampling_session)
        plane.sessions.record_heartbeat(session.session, loop_time())
        if (why := plane.breakdowns.engine_failure(session.base_model, tenant)) is not None:
            raise FailedTurnError(why)

        def reply(request: RequestId | SlackwaterError, new: bool) -> None:
            if isinstance(request, SlackwaterError):
                self.refuse(message.number, request)
            else:
                self.send(wire.SampleAccepted(message.number, request, new))

        on_settled = partial(self._send_outcome, None)
        plane.sampling.accept(session, message.seq, message.payload, reply, on_settled)

    def _send_outcome(
        self, number: int | None, request: RequestId, outcome: RequestOutcome
    ) -> None:
        owner = None if outcome.owner is None else outcome.owner.value
        kind = str(outcome.kind)
        self.send(wire.FutureSettled(number, request, kind, outcome.result, outcome.error, owner))

    async def _answer(self, message: wire.AskModel | wire.AskFuture) -> None:
        tenant = TenantId(message.tenant)
        try:
            if isinstance(message, wire.AskModel):
                base, version = await self._channel.names.weights(tenant, message.name)
                self.send(wire.ModelFound(message.number, base.name, version))
                return
            request = RequestId(message.request)
            outcome = await self._plane.outcome(tenant, request, message.hold_s)
            if outcome is None:
                self.send(wire.RequestPending(message.number, self._plane.pause_reason(request)))
            else:
                self._send_outcome(message.number, request, outcome)
        except SlackwaterError as error:
            self.refuse(message.number, error)

    # ---- results of turns ----
    def queue_tokens(self, number: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Send these as columns, together with all other tokens of a few milliseconds."""
        numbers, counts, all_tokens, all_logprobs = self._unsent
        if not numbers:
            self.connection.schedule_flush()
        numbers.append(number)
        counts.append(len(tokens))
        all_tokens.extend(tokens)
        all_logprobs.extend(logprobs)

    def put_spent(self) -> None:
        """Report the loop time that tenants used here, with the next write."""
        spent = self._plane.queues.shares.totals
        if spent != self._reported_spent:
            since = {name: spent[name] - self._reported_spent[name] for name in spent}
            self.connection.put(wire.TimeCharged({name: s for name, s in since.items() if s}))
            self._reported_spent = spent.copy()

    def gather(self) -> None:
        """Call before any other record: a choice's tokens must precede its end."""
        if self._unsent[0]:
            columns, self._unsent = self._unsent, _empty_columns()
            self.connection.put(wire.Tokens(*(column.tobytes() for column in columns)))


def _empty_columns() -> "tuple[array[int], array[int], array[int], array[float]]":
    return array("Q"), array("I"), array("I"), array("f")


class _FrontConnection(ChannelConnection):
    """A front end's connection; its first record is the setup."""

    def __init__(self, front: _Front) -> None:
        super().__init__(front.receive_frame, front.handle_disconnect, gather_s=0.0)
        self._front = front

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._front.send_setup()

    def flush(self) -> None:
        self._front.gather()
        self._front.put_spent()
        super().flush()


class _Choice:
    """The listener of one turn of a front end."""

    __slots__ = ("base_model", "front", "name", "number", "tenant")

    def __init__(
        self, front: _Front, number: int, name: TurnId, tenant: TenantId, base_model: str
    ) -> None:
        self.front, self.number, self.name = front, number, name
        self.tenant, self.base_model = tenant, base_model

    def append(self, more: TurnTokens) -> None:
        if more.topk or more.prompt_logprobs is not None:
            self.front.send(wire.AnnotatedTokens(self.number, _encode(more)))
        else:
            self.stream(more.tokens, more.logprobs)

    def stream(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.front.queue_tokens(self.number, tokens, logprobs)

    def complete(self, result: TurnResult) -> None:
        self.front.release(self)
        self.front.send(wire.ChoiceCompleted(self.number, _encode(result)))

    def fail(self, error: str) -> None:
        self.front.release(self)
        self.front.send(wire.ChoiceFailed(self.number, error))
