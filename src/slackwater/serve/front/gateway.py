"""A front end's end of the channel: what its routes ask the control plane.

What they ask and need not send is here too: keys, models, limits, threads. A sample that came this
way brings its outcome this way, so the request that waits for it asks nobody.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from slackwater.model.errors import SlackwaterError
from slackwater.model.ids import RequestId, TenantId, TurnId
from slackwater.model.operation import FaultOwner
from slackwater.model.sampling import Sampling
from slackwater.model.session import SamplingSession
from slackwater.runtime.executors.turn_results import TurnResult, TurnTokens
from slackwater.runtime.services.fair_work import FairWork
from slackwater.runtime.services.helper_processes import HelperProcesses
from slackwater.runtime.services.loop_shares import LoopShares
from slackwater.runtime.services.tenants import Tenants
from slackwater.runtime.services.turn_shares import TurnShares
from slackwater.runtime.store.base_models import BaseModel, BaseModels
from slackwater.runtime.store.future_board import FutureBoard, RequestOutcome
from slackwater.serve.front.connection import ChannelConnection
from slackwater.serve.http.errors import FailedTurnError, PlaneRefusedError
from slackwater.wire import front as wire

_SESSIONS = 256  # remembered; another is asked for again
_LAST_LOOK_S = 0.05
_NO_TURN = TurnId("")
_tokens_of = msgspec.msgpack.Decoder(TurnTokens).decode
_result_of = msgspec.msgpack.Decoder(TurnResult).decode
_GONE = "the control plane has gone; it is started again, or was stopped"


class ChoiceListener(Protocol):
    """Who is told how a choice goes."""

    def appended(self, more: TurnTokens) -> None: ...
    def completed(self, result: TurnResult) -> None: ...
    def failed(self, error: SlackwaterError) -> None: ...


@dataclass(frozen=True, slots=True)
class ChoicesRequest:
    """`n` choices for each prompt, a u32 per token: how to sample, and with which weights."""

    prompts: list[bytes]
    max_tokens: list[int]
    n: int
    sampling: Sampling
    base_model: str
    version: str
    job: str

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n


class Gateway:
    """`ready` says whether the control plane can be asked, once that is known. `stopping` is set
    when the front end should answer what is under way, and end.
    """

    tenants: Tenants
    bases: BaseModels
    setup: wire.Setup

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.connection = ChannelConnection(self._heard, self._lost)
        self.board = FutureBoard()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._choices: dict[int, ChoiceListener] = {}
        self._sessions: OrderedDict[tuple[TenantId, str], SamplingSession] = OrderedDict()
        self._samplers: dict[int, TenantId] = {}
        self._is_lost = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            wire.Setup: self._set_up,
            wire.StopServing: self._stop,
            wire.Accepted: self._answered,
            wire.Refused: self._refused,
            wire.Spent: self._spent,
            wire.Tokens: self._tokens,
            wire.MoreTokens: self._more_tokens,
            wire.Completed: self._completed,
            wire.Failed: self._failed,
            wire.Sampled: self._sampled,
            wire.FutureSettled: self._outcome,
            wire.Pending: self._answered,
            wire.SessionFound: self._answered,
            wire.ModelFound: self._answered,
        }

    def _set_up(self, setup: wire.Setup) -> None:
        self.setup = setup
        self.tenants = Tenants({key: TenantId(name) for key, name in setup.keys.items()})
        models = {name: BaseModel.read(name, Path(path)) for name, path in setup.models.items()}
        self.bases = BaseModels(models, or_none=True)
        names = self.tenants.names()
        self.shares = TurnShares(setup.max_turns, ("",))
        self.loop_shares = LoopShares(len(names))
        self.fair_work = FairWork(self.loop_shares)
        self.helpers = HelperProcesses("slackwater.serve.http.helper")
        self.ready.set_result(True)

    @property
    def is_idle(self) -> bool:
        """Whether nothing was asked of the control plane that has not ended."""
        return not self._asked and not self._choices

    def close(self) -> None:
        self.connection.close()
        self.fair_work.close()
        self.helpers.close()

    # ---- generations ----
    async def generate(
        self,
        tenant: TenantId,
        asked: ChoicesRequest,
        listeners: Sequence[ChoiceListener],
        *,
        stream: bool,
        arrived_s: float | None,
    ) -> list[int]:
        """The choices' numbers; those that stream are accepted then."""
        numbers = [next(self._numbers) for _ in listeners]
        self._choices.update(zip(numbers, listeners, strict=True))
        record = wire.GenerateChoices(
            numbers[0],
            tenant,
            asked.job,
            asked.base_model,
            asked.version,
            stream,
            arrived_s,
            asked.sampling,
            asked.n,
            asked.prompts,
            asked.max_tokens,
        )
        try:
            if stream:
                await self._ask(numbers[0], record)
            else:
                self._send(record)
        except BaseException:
            self.abandon(tenant, numbers)
            raise
        return numbers

    def abandon(self, tenant: TenantId, numbers: Sequence[int]) -> None:
        """Nobody waits for these any more."""
        left = [number for number in numbers if self._choices.pop(number, None) is not None]
        if left:
            self.connection.send(wire.Abandon(tenant, left))

    # ---- samples ----
    async def session(self, tenant: TenantId, name: str) -> SamplingSession:
        """One of the tenant's sampling sessions, which may have ended since it was first seen."""
        found = self._sessions.get((tenant, name))
        if found is None:
            number = next(self._numbers)
            answer = await self._ask(number, wire.AskSession(number, tenant, name))
            found = self._sessions[tenant, name] = answer.session
            if len(self._sessions) > _SESSIONS:
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
        except PlaneRefusedError:  # it may have ended
            self._sessions.pop((tenant, session.sampling_session), None)
            raise
        finally:
            self._samplers.pop(number, None)
        return RequestId(answer.request)

    async def outcome(
        self, tenant: TenantId, request: RequestId, hold_s: float
    ) -> RequestOutcome | wire.Pending:
        """How a request ended, or why it has not within `hold_s`."""
        if self.board.tenant_of(request) == tenant:
            if await self.board.wait(request, hold_s) and (how := self.board.recent(request)):
                self.board.forget([request])  # asked again, the control plane knows it
                return how
            hold_s = _LAST_LOOK_S
        number = next(self._numbers)
        record = wire.AskFuture(number, tenant, request, hold_s)
        answer: wire.FutureSettled | wire.Pending = await self._ask(number, record)
        return answer if isinstance(answer, wire.Pending) else _outcome_of(answer)

    # ---- names ----
    async def weights(self, tenant: TenantId, model: str) -> tuple[BaseModel, str]:
        """The base model and the weight version of a name."""
        for base in self.bases:
            if base.name == model:
                return base, base.version
        number = next(self._numbers)
        found = await self._ask(number, wire.AskModel(number, tenant, model))
        return self.bases.get(found.base_model), found.version

    # ---- what the control plane says ----
    async def _ask(self, number: int, record: wire.Record) -> Any:
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(record)
            return await asked
        finally:
            self._asked.pop(number, None)

    def _send(self, record: wire.Record) -> None:
        if self._is_lost:
            raise FailedTurnError(_GONE)
        self.connection.send(record)

    def _heard(self, body: bytes) -> None:
        for record in wire.decode_to_front(body):
            self._handlers[type(record)](record)

    def _stop(self, record: wire.StopServing) -> None:
        self.board.close()  # nobody is kept waiting
        self._end()

    def _lost(self) -> None:
        """Answer everybody who waits, and end."""
        self._is_lost = True
        self.board.close()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(FailedTurnError(_GONE))
        for listener in tuple(self._choices.values()):
            listener.failed(FailedTurnError(_GONE))
        self._choices.clear()
        self._end()

    def _end(self) -> None:
        if not self.ready.done():
            self.ready.set_result(False)
        self.stopping.set()

    def _answered(self, record: Any) -> None:
        asked = self._asked.get(record.number)
        if asked is not None and not asked.done():
            asked.set_result(record)

    def _refused(self, record: wire.Refused) -> None:
        error = PlaneRefusedError(record.status, record.message)
        asked = self._asked.get(record.number)
        if asked is None:
            self._ended(record.number, error)
        elif not asked.done():
            asked.set_exception(error)

    def _spent(self, record: wire.Spent) -> None:
        for tenant, seconds in record.seconds.items():
            self.loop_shares.spent(TenantId(tenant), seconds)

    def _tokens(self, record: wire.Tokens) -> None:
        numbers = np.frombuffer(record.numbers, "<u8").tolist()
        counts, tokens = (
            np.frombuffer(column, "<u4").tolist() for column in (record.counts, record.tokens)
        )
        logprobs, start = np.frombuffer(record.logprobs, "<f4").tolist(), 0
        for number, count in zip(numbers, counts, strict=True):
            end = start + count
            if (listener := self._choices.get(number)) is not None:
                listener.appended(TurnTokens(_NO_TURN, tokens[start:end], logprobs[start:end]))
            start = end

    def _more_tokens(self, more: wire.MoreTokens) -> None:
        if (listener := self._choices.get(more.number)) is not None:
            listener.appended(_tokens_of(more.more))

    def _completed(self, done: wire.Completed) -> None:
        if (listener := self._choices.pop(done.number, None)) is not None:
            listener.completed(_result_of(done.result))

    def _failed(self, record: wire.Failed) -> None:
        self._ended(record.number, FailedTurnError(record.error))

    def _ended(self, number: int, error: SlackwaterError) -> None:
        if (listener := self._choices.pop(number, None)) is not None:
            listener.failed(error)

    def _sampled(self, record: wire.Sampled) -> None:
        tenant = self._samplers.get(record.number)
        if record.new and tenant is not None:
            self.board.expect(RequestId(record.request), tenant)
        self._answered(record)

    def _outcome(self, record: wire.FutureSettled) -> None:
        if record.number is not None:
            self._answered(record)
        elif self.board.tenant_of(RequestId(record.request)) is not None:
            self.board.settle(RequestId(record.request), _outcome_of(record))


def _outcome_of(record: wire.FutureSettled) -> RequestOutcome:
    owner = None if record.owner is None else FaultOwner(record.owner)
    return RequestOutcome(record.kind, record.result, record.error, owner)
