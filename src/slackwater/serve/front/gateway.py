"""A front end's end of the channel: requests of its routes to the control plane.

Keys, models, limits and threads are here too, because routes need them without asking. The outcome
of a sample comes over the same channel, so waiting for it takes no request.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import structs

from slackwater.model.errors import SlackwaterError
from slackwater.model.ids import RequestId, TenantId, TurnId
from slackwater.model.operation import FaultOwner
from slackwater.model.session import SamplingSession
from slackwater.runtime.executors.turn_results import TurnResult, TurnTokens
from slackwater.runtime.services.helper_processes import HelperProcesses
from slackwater.runtime.services.loop_shares import FairWork, LoopShares
from slackwater.runtime.services.tenants import Tenants, TurnShares
from slackwater.runtime.store.base_models import BaseModel, BaseModels
from slackwater.runtime.store.outcomes import FutureBoard, RequestOutcome
from slackwater.serve.front.connection import GATHER_SHARED_S, ChannelConnection
from slackwater.serve.http.errors import FailedTurnError, PlaneRefusedError
from slackwater.wire import front as wire

_MAX_CACHED_SESSIONS = 256
_FINAL_POLL_S = 0.05
_NO_TURN = TurnId("")
_decode_tokens = msgspec.msgpack.Decoder(TurnTokens).decode
_decode_result = msgspec.msgpack.Decoder(TurnResult).decode
_PLANE_GONE = "the control plane has gone; it is started again, or was stopped"


class ChoiceListener(Protocol):
    """Receives the tokens and the end of one choice."""

    def on_tokens(self, tokens: TurnTokens) -> None: ...
    def on_complete(self, result: TurnResult) -> None: ...
    def on_failure(self, error: SlackwaterError) -> None: ...


class Gateway:
    """`ready` becomes true when the control plane has sent its setup, false if it is lost before.
    `stopping` is set when the front end should answer its open requests and end.
    """

    tenants: Tenants
    bases: BaseModels
    setup: wire.Setup

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.connection = ChannelConnection(self._receive_frame, self._handle_disconnect)
        self.board = FutureBoard()
        self._numbers = itertools.count(1)
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._choices: dict[int, ChoiceListener] = {}
        self._sessions: OrderedDict[tuple[TenantId, str], SamplingSession] = OrderedDict()
        self._samplers: dict[int, TenantId] = {}
        self._is_lost = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            wire.Setup: self._set_up,
            wire.StopServing: self._stop,
            wire.ChoicesAccepted: self._resolve_request,
            wire.RequestRefused: self._handle_refusal,
            wire.TimeCharged: self._record_spent,
            wire.Tokens: self._deliver_tokens,
            wire.AnnotatedTokens: self._deliver_scored_tokens,
            wire.ChoiceCompleted: self._complete_choice,
            wire.ChoiceFailed: self._handle_failure,
            wire.SampleAccepted: self._accept_sample,
            wire.FutureSettled: self._settle_future,
            wire.RequestPending: self._resolve_request,
            wire.SessionFound: self._resolve_request,
            wire.ModelFound: self._resolve_request,
        }

    def _set_up(self, setup: wire.Setup) -> None:
        self.setup = setup
        self.tenants = Tenants({key: TenantId(name) for key, name in setup.keys.items()})
        models = {name: BaseModel.read(name, Path(path)) for name, path in setup.models.items()}
        self.bases = BaseModels(models, or_none=True)
        names = self.tenants.names()
        self.shares = TurnShares(setup.max_turns, ("",))
        self.loop_shares = LoopShares(len(names))
        if self.loop_shares.is_shared:
            self.connection.gather_s = GATHER_SHARED_S
        self.fair_work = FairWork(self.loop_shares)
        self.helpers = HelperProcesses()
        self.ready.set_result(True)

    @property
    def is_idle(self) -> bool:
        """Whether no request to the control plane is open."""
        return not self._requests and not self._choices

    def close(self) -> None:
        self.connection.close()
        self.fair_work.close()
        self.helpers.close()

    # ---- generations ----
    async def generate(
        self, request: wire.GenerateChoices, listeners: Sequence[ChoiceListener]
    ) -> list[int]:
        """Number the request's choices; a streaming request returns once it is accepted."""
        numbers = [next(self._numbers) for _ in listeners]
        self._choices.update(zip(numbers, listeners, strict=True))
        record = structs.replace(request, number=numbers[0])
        try:
            if request.stream:
                await self._ask(numbers[0], record)
            else:
                self._send(record)
        except BaseException:
            self.abandon(request.tenant, numbers)
            raise
        return numbers

    def abandon(self, tenant: str, numbers: Sequence[int]) -> None:
        """Cancel the choices of a request that have not ended."""
        left = [number for number in numbers if self._choices.pop(number, None) is not None]
        if left:
            self.connection.send(wire.AbandonChoices(tenant, numbers[0], len(numbers)))

    # ---- samples ----
    async def session(self, tenant: TenantId, name: str) -> SamplingSession:
        """One of the tenant's sampling sessions; a cached one may have ended since."""
        found = self._sessions.get((tenant, name))
        if found is None:
            number = next(self._numbers)
            answer = await self._ask(number, wire.AskSession(number, tenant, name))
            found = self._sessions[tenant, name] = answer.session
            if len(self._sessions) > _MAX_CACHED_SESSIONS:
                self._sessions.popitem(last=False)
        return found

    async def sample(
        self, tenant: TenantId, session: SamplingSession, seq: int, payload: bytes
    ) -> RequestId:
        """The sample's name, once it is durable."""
        number = next(self._numbers)
        self._samplers[number] = tenant
        try:
            record = wire.Sample(number, tenant, session.sampling_session, seq, payload)
            answer = await self._ask(number, record)
        except PlaneRefusedError:  # the session may have ended
            self._sessions.pop((tenant, session.sampling_session), None)
            raise
        finally:
            self._samplers.pop(number, None)
        return RequestId(answer.request)

    async def outcome(
        self, tenant: TenantId, request: RequestId, hold_s: float
    ) -> RequestOutcome | wire.RequestPending:
        """How a request ended, or why it has not within `hold_s`."""
        if self.board.tenant_of(request) == tenant:
            if await self.board.wait(request, hold_s) and (outcome := self.board.recent(request)):
                self.board.forget([request])  # the control plane answers if it is asked again
                return outcome
            hold_s = _FINAL_POLL_S
        number = next(self._numbers)
        record = wire.AskFuture(number, tenant, request, hold_s)
        answer: wire.FutureSettled | wire.RequestPending = await self._ask(number, record)
        return answer if isinstance(answer, wire.RequestPending) else _to_outcome(answer)

    # ---- names ----
    async def weights(self, tenant: TenantId, model: str) -> tuple[BaseModel, str]:
        """The base model and the weight version of a name."""
        for base in self.bases:
            if base.name == model:
                return base, base.version
        number = next(self._numbers)
        found = await self._ask(number, wire.AskModel(number, tenant, model))
        return self.bases.get(found.base_model), found.version

    # ---- messages of the control plane ----
    async def _ask(self, number: int, record: wire.Record) -> Any:
        request = self._requests[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(record)
            return await request
        finally:
            self._requests.pop(number, None)

    def _send(self, record: wire.Record) -> None:
        if self._is_lost:
            raise FailedTurnError(_PLANE_GONE)
        self.connection.send(record)

    def _receive_frame(self, body: bytes) -> None:
        for record in wire.decode_to_front(body):
            self._handlers[type(record)](record)

    def _stop(self, record: wire.StopServing) -> None:
        self.board.close()  # release those who wait
        self._end()

    def _handle_disconnect(self) -> None:
        """Fail every open request, and end."""
        self._is_lost = True
        self.board.close()
        for request in self._requests.values():
            if not request.done():
                request.set_exception(FailedTurnError(_PLANE_GONE))
        for listener in tuple(self._choices.values()):
            listener.on_failure(FailedTurnError(_PLANE_GONE))
        self._choices.clear()
        self._end()

    def _end(self) -> None:
        if not self.ready.done():
            self.ready.set_result(False)
        self.stopping.set()

    def _resolve_request(self, record: Any) -> None:
        request = self._requests.get(record.number)
        if request is not None and not request.done():
            request.set_result(record)

    def _handle_refusal(self, record: wire.RequestRefused) -> None:
        error = PlaneRefusedError(record.status, record.message)
        request = self._requests.get(record.number)
        if request is None:
            self._fail_choice(record.number, error)
        elif not request.done():
            request.set_exception(error)

    def _record_spent(self, record: wire.TimeCharged) -> None:
        for tenant, seconds in record.seconds.items():
            self.loop_shares.charge(TenantId(tenant), seconds)

    def _deliver_tokens(self, record: wire.Tokens) -> None:
        numbers = np.frombuffer(record.numbers, "<u8").tolist()
        counts, tokens = (
            np.frombuffer(column, "<u4").tolist() for column in (record.counts, record.tokens)
        )
        logprobs, start = np.frombuffer(record.logprobs, "<f4").tolist(), 0
        for number, count in zip(numbers, counts, strict=True):
            end = start + count
            if (listener := self._choices.get(number)) is not None:
                listener.on_tokens(TurnTokens(_NO_TURN, tokens[start:end], logprobs[start:end]))
            start = end

    def _deliver_scored_tokens(self, tokens: wire.AnnotatedTokens) -> None:
        if (listener := self._choices.get(tokens.number)) is not None:
            listener.on_tokens(_decode_tokens(tokens.more))

    def _complete_choice(self, record: wire.ChoiceCompleted) -> None:
        if (listener := self._choices.pop(record.number, None)) is not None:
            listener.on_complete(_decode_result(record.result))

    def _handle_failure(self, record: wire.ChoiceFailed) -> None:
        self._fail_choice(record.number, FailedTurnError(record.error))

    def _fail_choice(self, number: int, error: SlackwaterError) -> None:
        if (listener := self._choices.pop(number, None)) is not None:
            listener.on_failure(error)

    def _accept_sample(self, record: wire.SampleAccepted) -> None:
        tenant = self._samplers.get(record.number)
        if record.new and tenant is not None:
            self.board.expect(RequestId(record.request), tenant)
        self._resolve_request(record)

    def _settle_future(self, record: wire.FutureSettled) -> None:
        if record.number is not None:
            self._resolve_request(record)
        elif self.board.tenant_of(RequestId(record.request)) is not None:
            self.board.settle(RequestId(record.request), _to_outcome(record))


def _to_outcome(record: wire.FutureSettled) -> RequestOutcome:
    owner = None if record.owner is None else FaultOwner(record.owner)
    return RequestOutcome(record.kind, record.result, record.error, owner)
