"""Sample requests: durable, deduplicated by number, and generated as one turn per sample.

A request that was accepted before a restart is generated again from its seeds with the same tokens.
"""

import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec
import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from slackwater.control.rollout.commands import AppendTokens, CompleteTurn
from slackwater.model.errors import ConfigError, NotFoundError, SlackwaterError
from slackwater.model.ids import (
    JobId,
    RequestId,
    SamplingSessionId,
    SessionId,
    TenantId,
    TrajectoryId,
    TurnId,
)
from slackwater.model.operation import FaultOwner
from slackwater.model.sampling import Sampling
from slackwater.model.session import SamplingSession
from slackwater.model.turn import TurnSpec
from slackwater.runtime.executors.engines import EngineExecutor
from slackwater.runtime.net.background import Background
from slackwater.runtime.services.fair_work import FairWork
from slackwater.runtime.services.tenant_queues import TenantQueues
from slackwater.runtime.services.turn_shares import TurnShares
from slackwater.runtime.store import sample_log as log
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.op_payloads import (
    SamplePayload,
    SampleResult,
    SequencePayload,
    TargetScores,
    decode_sample,
    encode,
)
from slackwater.runtime.store.outcomes import FutureBoard, RequestOutcome, WriteAhead
from slackwater.runtime.store.sample_log import FinishedRequest, FinishedRequestFeed
from slackwater.runtime.store.schema import sampling_sessions
from slackwater.wire.messages import HeldTurn

KIND = "sample"
AcceptCallback: TypeAlias = Callable[[RequestId | SlackwaterError, bool], None]
FinishCallback: TypeAlias = Callable[[RequestId, RequestOutcome], None]

_AT_ONCE = 4  # more turns are begun or stopped in slices
_LONG_ANSWER_TOKENS = 2000


class SamplingService:
    """All sampling sessions and their requests."""

    def __init__(
        self,
        store: Store,
        board: FutureBoard,
        background: Background,
        rollout: EngineExecutor,
        shares: TurnShares,
        fair: tuple[TenantQueues, FairWork],
        job_of: Callable[[SessionId], JobId],
    ) -> None:
        self._queues, self._fair_work = fair
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

        def sessions_of(connection: Connection) -> list[SamplingSession]:
            rows = connection.execute(
                sa.select(sampling_sessions).order_by(sampling_sessions.c.created_s)
            )
            return [log.sampling_session_of(row) for row in rows]

        sessions = await self._store.call(sessions_of)
        done = await self._store.call(log.read_finished)
        waiting = await self._store.call(log.read_waiting)
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
        """One of the tenant's sampling sessions."""
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
        request = RequestId(f"sm-{secrets.token_hex(12)}")
        row = log.new_row(request, session, seq, payload, time.time())
        known: list[RequestId | SlackwaterError | None] = [None]

        def write(connection: Connection) -> None:
            known[0] = log.find_numbered(connection, session, seq, payload)
            if known[0] is None:
                connection.execute(sa.text(row.sql), row.values)

        def begin() -> None:
            found = known[0]
            if found is None:
                on_accept(request, True)
                self._open(request, session, sample, on_finish).start({})
            else:
                self._shares.give_back(tenant, share)
                on_accept(found, False)

        self._ahead.then(begin, replace(row, if_known=write))

    async def acknowledge(self, session: SamplingSession, requests: Sequence[RequestId]) -> None:
        """The client has received these results: delete them."""
        self.finished.acknowledge(session.sampling_session, set(requests))
        self._board.forget(r for r in requests if self._board.tenant_of(r) == session.tenant)
        await self._store.call_sized(
            100 * len(requests),
            lambda c: log.drop_results(c, session.sampling_session, requests),
        )

    def job_of(self, request: RequestId) -> JobId | None:
        """The job of an unfinished request."""
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
        """The sampling session of an unfinished request."""
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
        """End a request without an answer."""
        self._finish(request, self._close(request), outcome)

    def _close(self, request: RequestId) -> "_SampleRun":
        run = self._under_way.pop(request)
        self._shares.give_back(run.session.tenant, run.share)
        return run

    def _finish(self, request: RequestId, run: "_SampleRun", outcome: RequestOutcome) -> None:
        finished_s = time.time()
        size_bytes = None if outcome.result is None else len(outcome.result)

        def settle() -> None:
            self._board.settle(request, outcome)
            session = run.session.sampling_session
            self.finished.add(session, FinishedRequest(request, finished_s, size_bytes))
            run.on_finish(request, outcome)

        self._ahead.then(settle, log.finish_row(request, outcome, finished_s))


class _SampleRun:
    """One request's turns, until the last has ended."""

    def __init__(
        self,
        request: RequestId,
        session: SamplingSession,
        sample: SamplePayload,
        service: SamplingService,
        job: JobId,
        rollout: EngineExecutor,
        on_finish: FinishCallback,
    ) -> None:
        self.session = session
        self.job = job
        self.on_finish = on_finish
        self._request = request
        self._sample = sample
        self.turns, self.share = len(sample.seeds), sample.share
        self._service = service
        self._rollout = rollout
        self._results: dict[int, CompleteTurn] = {}
        self._is_over = False

    def turn_name(self, index: int) -> TurnId:
        return TurnId(f"{self._request}/{index}")

    def start(self, returned: Mapping[TurnId, HeldTurn]) -> None:
        """Generate the turns; of those in `returned` only the rest."""
        prompt = array("I", self._sample.prompt)  # the type that messages to engines have

        def submit(index: int) -> None:
            if self._is_over:
                return
            try:
                spec = self._spec(index, prompt)
            except SlackwaterError as error:
                self.fail(str(error))
            else:
                listener = _SampleTurn(self, index)
                self._rollout.submit(spec, listener, returned=returned.get(spec.turn))

        self._service.run_in_slices(self.session.tenant, range(self.turns), submit)

    def _spec(self, index: int, prompt: "array[int]") -> TurnSpec:
        sample, first = self._sample, index == 0
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
        if len(self._results) == len(self._sample.seeds):
            self._is_over = True
            self._service.answer(self._request, self._answer)

    def is_long(self) -> bool:
        """Whether writing the answer takes long."""
        scored = self._results[0].prompt_logprobs is not None
        tokens = sum(len(result.tokens) for result in self._results.values())
        return scored or self._sample.topk_logprobs > 0 or tokens > _LONG_ANSWER_TOKENS

    def _answer(self) -> SampleResult:
        ordered = [self._results[index] for index in range(len(self._sample.seeds))]
        sequences = [
            SequencePayload(
                result.reason.value,
                np.asarray(result.tokens, "<i4").tobytes(),
                np.asarray(result.logprobs, "<f4").tobytes(),
                [list(row) for row in result.topk],
            )
            for result in ordered
        ]
        scores = ordered[0].prompt_logprobs
        if scores is None:
            return SampleResult(sequences)
        shown = self._sample.prompt_logprobs_last_n or len(scores)
        hidden = len(scores) - shown
        own = [None if place < hidden else score for place, score in enumerate(scores)]
        return SampleResult(
            sequences,
            own if self._sample.prompt_logprobs else None,
            [
                None if row is None or place < hidden else list(row)
                for place, row in enumerate(ordered[0].prompt_topk)
            ],
            self._target_scores(ordered[0]),
            [list(row) for row in ordered[0].prompt_alternatives],
        )

    def _target_scores(self, result: CompleteTurn) -> TargetScores | None:
        targets = self._sample.targets
        if targets is None:
            return None
        rows = [list(row) for row in result.prompt_targets]
        return TargetScores(rows, targets.width, targets.columns)

    def fail(self, error: str) -> None:
        """Fail the request because one of its turns failed, and cancel the others."""
        if not self._is_over:
            self.cancel()
            self._service.end(self._request, RequestOutcome(KIND, None, error, FaultOwner.SERVER))

    def cancel(self) -> None:
        self._is_over = True
        left = [index for index in range(self.turns) if index not in self._results]
        self._service.run_in_slices(
            self.session.tenant, left, lambda index: self._rollout.cancel(self.turn_name(index))
        )


class _SampleTurn:
    """The listener of one turn of a request."""

    def __init__(self, run: _SampleRun, index: int) -> None:
        self._run = run
        self._index = index

    def append(self, more: AppendTokens) -> None:
        """Sample requests are answered whole."""

    def stream(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Sample requests are answered whole."""

    def complete(self, result: CompleteTurn) -> None:
        self._run.complete(self._index, result)

    def fail(self, error: str) -> None:
        self._run.fail(error)


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
