"""Sample requests: durable, deduplicated by number, and generated as one turn per sample.

A request that was accepted before a restart is generated again from its seeds with the same tokens.
"""

import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from slackwater.control.rollout.commands import AppendTokens, CompleteTurn
from slackwater.model.errors import ConfigError, NotFoundError, RefusedError, SlackwaterError
from slackwater.model.ids import (
    JobId,
    RequestId,
    SamplingSessionId,
    SessionId,
    TenantId,
    TrajectoryId,
    TurnId,
)
from slackwater.model.operation import FaultOwner, OpStatus
from slackwater.model.sampling import Sampling
from slackwater.model.session import SamplingSession
from slackwater.model.turn import TurnSpec
from slackwater.runtime.executors.engines import EngineExecutor
from slackwater.runtime.net.background import Background
from slackwater.runtime.services.loop_shares import FairWork, TenantQueues
from slackwater.runtime.services.tenants import TurnShares
from slackwater.runtime.store.database import Row, Store
from slackwater.runtime.store.op_payloads import (
    FORMAT,
    SamplePayload,
    SampleResult,
    decode_sample,
    encode,
)
from slackwater.runtime.store.operation_log import digest_of
from slackwater.runtime.store.outcomes import (
    FinishedRequest,
    FinishedRequestFeed,
    FutureBoard,
    RequestOutcome,
    WriteAhead,
)
from slackwater.runtime.store.sampling_sessions import IN_ONE_STATEMENT, read_sampling_sessions
from slackwater.runtime.store.schema import samples
from slackwater.wire.messages import HeldTurn

KIND = "sample"
AcceptCallback: TypeAlias = Callable[[RequestId | SlackwaterError, bool], None]
FinishCallback: TypeAlias = Callable[[RequestId, RequestOutcome], None]

_AT_ONCE = 4  # more turns are begun or stopped in slices
_LONG_ANSWER_TOKENS = 2000
# Made once: making a statement takes longer than executing it.
_NUMBERED = sa.select(samples.c.request, samples.c.digest).where(
    samples.c.sampling_session == sa.bindparam("in_session"),
    samples.c.seq == sa.bindparam("number"),
)
_NEW = ("request", "sampling_session", "tenant", "seq", "digest", "payload", "status")
_ADD = str(samples.insert().compile(column_keys=(*_NEW, "created_s", "format")))
_ENDED = ("payload", "status", "finished_s", "result", "error", "owner")
_FINISH = str(
    samples.update()
    .where(samples.c.request == sa.bindparam("finished"))
    .compile(column_keys=_ENDED)
)


class SamplingService:
    """All sampling sessions and their requests."""

    def __init__(
        self,
        store: Store,
        board: FutureBoard,
        background: Background,
        rollout: EngineExecutor,
        shares: TurnShares,
        queues: TenantQueues,
        fair_work: FairWork,
        job_of: Callable[[SessionId], JobId],
    ) -> None:
        self._queues, self._fair_work = queues, fair_work
        self._ahead = WriteAhead(store, background)
        self._job_of = job_of
        self._store = store
        self._board = board
        self._background = background
        self._rollout = rollout
        self._shares = shares
        self._sessions: dict[SamplingSessionId, SamplingSession] = {}
        self._under_way: dict[RequestId, _SampleRun] = {}
        self._adopted: list[_SampleRun] = []
        self.finished = FinishedRequestFeed()

    async def adopt(self) -> None:
        """Adopt sessions and unanswered requests from the durable log; `resume` starts them."""
        sessions = await self._store.call(read_sampling_sessions)
        done = await self._store.call(read_finished)
        waiting = await self._store.call(read_waiting)
        for session in sessions:
            self.add_session(session)
        for name, finished in done:
            self.finished.add(SamplingSessionId(name), finished)
        for request, name, payload in waiting:
            found = self._sessions.get(SamplingSessionId(name))
            if found is not None:
                sample = decode_sample(payload)
                self._shares.take(found.tenant, sample.share)
                self._adopted.append(self._open(RequestId(request), found, sample))

    def resume(self) -> None:
        """Generate adopted requests, from the tokens that engines still have."""
        returned = self._rollout.take_returned_turns()
        for run in self._adopted:
            run.start(returned)
        self._adopted.clear()

    def add_session(self, session: SamplingSession) -> None:
        self._sessions[session.sampling_session] = session

    def drop_sessions(self, names: Sequence[SamplingSessionId]) -> None:
        """Drop sampling sessions, and end their unfinished requests."""
        for name in names:
            self._sessions.pop(name, None)
            self.finished.drop(name)
        gone = set(names)
        for request, run in list(self._under_way.items()):
            if run.session.sampling_session in gone:
                run.cancel()
                ended = "its sampling session has ended"
                self.end(request, RequestOutcome(KIND, None, ended, FaultOwner.USER))

    def session(self, tenant: TenantId, name: str) -> SamplingSession:
        found = self._sessions.get(SamplingSessionId(name))
        if found is None or found.tenant != tenant:
            raise NotFoundError(f"sampling_session_id: {name!r} is not one of yours, or has ended")
        return found

    def sessions(self) -> tuple[SamplingSession, ...]:
        return tuple(self._sessions.values())

    def accept(
        self,
        session: SamplingSession,
        seq: int,
        payload: bytes,
        on_accept: AcceptCallback,
        on_finish: FinishCallback = lambda request, outcome: None,
    ) -> None:
        """Accept a request. `on_accept` gets its id when it is durable, and whether it is new: the
        same number again is the same request. `on_finish` gets its outcome. UnavailableError: the
        tenant has too many turns.
        """
        sample = _decode(payload)
        share, tenant = sample.share, session.tenant
        what = "num_samples" if share == len(sample.seeds) else "samples x tokens x alternatives"
        self._shares.check(tenant, share, what)
        self._shares.take(tenant, share)  # before it is written, or many could pass at once
        now_s = time.time()  # first in the id, so that new rows are neighbours in the log's index
        request = RequestId(f"sm-{int(1000 * now_s):012x}{secrets.token_hex(6)}")
        known: list[RequestId | SlackwaterError | None] = [None]

        def write(connection: Connection) -> None:
            known[0] = find_numbered(connection, session, seq, payload)
            if known[0] is None:
                connection.execute(sa.text(row.sql), row.values)

        row = new_row(request, session, seq, payload, now_s, write)

        def begin() -> None:
            found = known[0]
            if found is None:
                on_accept(request, True)
                self._open(request, session, sample, on_finish).start({})
            else:
                self._shares.give_back(tenant, share)
                on_accept(found, False)

        self._ahead.then(begin, row)

    async def acknowledge(self, session: SamplingSession, requests: Sequence[RequestId]) -> None:
        """The client has received these results: delete them."""
        self.finished.acknowledge(session.sampling_session, set(requests))
        self._board.forget(r for r in requests if self._board.tenant_of(r) == session.tenant)
        await self._store.call_sized(
            100 * len(requests),
            lambda c: drop_results(c, session.sampling_session, requests),
        )

    def job_of(self, request: RequestId) -> JobId | None:
        run = self._under_way.get(request)
        return None if run is None else run.job

    def cancel(self, tenant: TenantId, request: RequestId) -> None:
        """Cancel a request; one that has ended keeps its outcome."""
        run = self._under_way.get(request)
        if run is not None and run.session.tenant == tenant:
            run.cancel()
            self.end(
                request, RequestOutcome(KIND, None, "cancelled by the client", FaultOwner.USER)
            )

    def session_of(self, request: RequestId) -> SamplingSession | None:
        run = self._under_way.get(request)
        return None if run is None else run.session

    def fail_all(self, session: SamplingSession, why: str) -> None:
        """Fail every unfinished request of a session: nothing will generate for it."""
        for run in [run for run in self._under_way.values() if run.session is session]:
            run.fail(why)

    def _open(
        self,
        request: RequestId,
        session: SamplingSession,
        sample: SamplePayload,
        on_finish: FinishCallback = lambda request, outcome: None,
    ) -> "_SampleRun":
        self._board.expect(request, session.tenant)
        job = self._job_of(session.session)
        run = _SampleRun(request, session, sample, self, job, self._rollout, on_finish)
        self._under_way[request] = run
        return run

    def run_in_slices(
        self, tenant: TenantId, items: Sequence[int], work: Callable[[int], object]
    ) -> None:
        """Do a few items at once, and more in turn with other tenants."""
        if len(items) <= _AT_ONCE:
            for item in items:
                work(item)
        else:
            self._queues.each(tenant, items, work)

    def answer(self, request: RequestId, answer: Callable[[], SampleResult]) -> None:
        """All turns of a request are complete: encode the answer, a long one on a thread."""
        run = self._close(request)
        if run.is_long():
            self._background.spawn(self._write_long(request, run, answer))
        else:
            self._finish(request, run, RequestOutcome(KIND, encode(answer())))

    async def _write_long(
        self, request: RequestId, run: "_SampleRun", answer: Callable[[], SampleResult]
    ) -> None:
        written = await self._fair_work.run(run.session.tenant, lambda: encode(answer()))
        self._finish(request, run, RequestOutcome(KIND, written))

    def end(self, request: RequestId, outcome: RequestOutcome) -> None:
        self._finish(request, self._close(request), outcome)

    def _close(self, request: RequestId) -> "_SampleRun":
        run = self._under_way.pop(request)
        self._shares.give_back(run.session.tenant, run.sample.share)
        return run

    def _finish(self, request: RequestId, run: "_SampleRun", outcome: RequestOutcome) -> None:
        finished_s = time.time()
        size_bytes = None if outcome.result is None else len(outcome.result)

        def settle() -> None:
            self._board.settle(request, outcome)
            session = run.session.sampling_session
            self.finished.add(session, FinishedRequest(request, finished_s, size_bytes))
            run.on_finish(request, outcome)

        self._ahead.then(settle, finish_row(request, outcome, finished_s))


@dataclass(eq=False, slots=True)
class _SampleRun:
    """One request's turns, until the last has ended."""

    request: RequestId
    session: SamplingSession
    sample: SamplePayload
    service: SamplingService
    job: JobId
    rollout: EngineExecutor
    on_finish: FinishCallback
    _results: dict[int, CompleteTurn] = field(default_factory=dict)
    _is_over: bool = False

    def turn_name(self, index: int) -> TurnId:
        return TurnId(f"{self.request}/{index}")

    def start(self, returned: Mapping[TurnId, HeldTurn]) -> None:
        """Generate the turns; of those in `returned` only the rest."""
        prompt = array("I", self.sample.prompt)  # the type that messages to engines have

        def submit(index: int) -> None:
            if self._is_over:
                return
            try:
                spec = self._spec(index, prompt)
            except SlackwaterError as error:
                self.fail(str(error))
            else:
                listener = _SampleTurn(self, index)
                self.rollout.submit(spec, listener, returned=returned.get(spec.turn))

        self.service.run_in_slices(self.session.tenant, range(len(self.sample.seeds)), submit)

    def _spec(self, index: int, prompt: "array[int]") -> TurnSpec:
        sample, first = self.sample, index == 0
        sampling = Sampling(
            max_tokens=sample.max_tokens,
            temperature=sample.temperature,
            top_p=sample.top_p,
            top_k=sample.top_k,
            seed=sample.seeds[index],
            stop_token_ids=tuple(sample.stop_token_ids),
            stop_strings=tuple(sample.stop_strings),
            prompt_logprobs=sample.prompt_logprobs and first,
            topk_prompt_logprobs=sample.topk_prompt_logprobs if first else 0,
            topk_logprobs=sample.topk_logprobs,
            target_prompt_tokens=sample.targets.rows if sample.targets and first else (),
            prompt_alternatives=sample.alternatives if first else 0,
        )
        return TurnSpec(
            turn=self.turn_name(index),
            trajectory=TrajectoryId(self.turn_name(index)),
            job=self.job,
            prompt=prompt,
            sampling=sampling,
            version=self.session.version,
            owner=self.session.tenant,
            base_model=self.session.base_model,
        )

    def complete(self, index: int, result: CompleteTurn) -> None:
        if self._is_over:
            return  # cancelled before its cancellation reached this turn
        self._results[index] = result
        if len(self._results) == len(self.sample.seeds):
            self._is_over = True
            self.service.answer(self.request, self._answer)

    def is_long(self) -> bool:
        scored = self._results[0].prompt_logprobs is not None
        tokens = sum(len(result.tokens) for result in self._results.values())
        return scored or self.sample.topk_logprobs > 0 or tokens > _LONG_ANSWER_TOKENS

    def _answer(self) -> SampleResult:
        return SampleResult.of(
            self.sample, [self._results[index] for index in range(len(self.sample.seeds))]
        )

    def fail(self, error: str) -> None:
        """Fail the request because one of its turns failed, and cancel the others."""
        if not self._is_over:
            self.cancel()
            self.service.end(self.request, RequestOutcome(KIND, None, error, FaultOwner.SERVER))

    def cancel(self) -> None:
        self._is_over = True
        left = [index for index in range(len(self.sample.seeds)) if index not in self._results]
        self.service.run_in_slices(
            self.session.tenant, left, lambda index: self.rollout.cancel(self.turn_name(index))
        )


@dataclass(slots=True)
class _SampleTurn:
    """The listener of one turn of a request."""

    run: _SampleRun
    index: int

    def append(self, more: AppendTokens) -> None:
        """Sample requests are answered whole."""

    def stream(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Sample requests are answered whole."""

    def complete(self, result: CompleteTurn) -> None:
        self.run.complete(self.index, result)

    def fail(self, error: str) -> None:
        self.run.fail(error)


def _decode(payload: bytes) -> SamplePayload:
    try:
        sample = decode_sample(payload)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError.of(
            "sample", f"{len(payload)} bytes", f"cannot be read: {error}"
        ) from None
    if not sample.prompt or len(sample.prompt) % 4 or not sample.seeds:
        raise ConfigError.of("sample", "prompt", "must be whole tokens, and have a seed")
    return sample


# ---- the log of requests: functions of a connection ----
def find_numbered(
    connection: Connection, session: SamplingSession, seq: int, payload: bytes
) -> RequestId | RefusedError | None:
    """The request that has this number already, if any; another one's is refused."""
    numbered = {"in_session": session.sampling_session, "number": seq}
    found = connection.execute(_NUMBERED, numbered).first()
    if found is None:
        return None
    if found.digest != digest_of(payload):
        return RefusedError(f"seq_id: {seq} was sent before with another request")
    return RequestId(found.request)


def new_row(
    request: RequestId,
    session: SamplingSession,
    seq: int,
    payload: bytes,
    now_s: float,
    if_known: Callable[[Connection], None] | None = None,
) -> Row:
    """The row of a new request; `if_known` is called where its number is taken."""
    row = {
        "request": request,
        "sampling_session": session.sampling_session,
        "tenant": session.tenant,
        "seq": seq,
        "digest": digest_of(payload),
        "payload": payload,
        "status": OpStatus.WAITING.value,
        "created_s": now_s,
        "format": FORMAT,
    }
    return Row(_ADD, row, len(payload), if_known)


def finish_row(request: RequestId, outcome: RequestOutcome, now_s: float) -> Row:
    """The changes of the row of a request that ended."""
    changed = {"finished": request, "payload": None, **outcome.columns(now_s)}
    return Row(_FINISH, changed, len(outcome.result or b""))


def drop_results(
    connection: Connection, session: SamplingSessionId, requests: Sequence[RequestId]
) -> None:
    """Results that were acknowledged; the rows stay, so that their numbers stay used."""
    for start in range(0, len(requests), IN_ONE_STATEMENT):
        some = requests[start : start + IN_ONE_STATEMENT]
        connection.execute(
            samples.update()
            .where(samples.c.sampling_session == session, samples.c.request.in_(some))
            .values(result=None)
        )


def read_waiting(connection: Connection) -> list[tuple[str, str, bytes]]:
    """Request, sampling session and payload of what is unanswered, oldest first."""
    columns = samples.c
    rows = connection.execute(
        sa.select(columns.request, columns.sampling_session, columns.payload)
        .where(columns.status == OpStatus.WAITING.value)
        .order_by(columns.created_s, columns.request)
    )
    return [(row.request, row.sampling_session, row.payload) for row in rows]


def read_finished(connection: Connection) -> list[tuple[str, FinishedRequest]]:
    """Sampling session and request of what is answered and not yet acknowledged, oldest first."""
    columns = samples.c
    rows = connection.execute(
        sa.select(
            columns.request,
            columns.sampling_session,
            columns.finished_s,
            sa.func.length(columns.result).label("size_bytes"),
        )
        .where(
            columns.finished_s.is_not(None),
            sa.or_(columns.result.is_not(None), columns.error.is_not(None)),
        )
        .order_by(columns.finished_s)
    )
    finished = partial(msgspec.convert, type=FinishedRequest, from_attributes=True)
    return [(row.sampling_session, finished(row)) for row in rows]
