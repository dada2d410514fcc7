"""The co-serving executor: one device, two engines on one pool of pages, in turns (ROSE 4.1).

The arbiter decides whose step is next. The service has priority on pages: what it needs is taken
from the rollout at once, first idle pages, then prefixes, then whole requests, which are given back
to the caller to continue on another instance.
"""

from collections.abc import Callable
from dataclasses import dataclass

from slackwater.engine.engine import Engine
from slackwater.engine.pages import PagePool
from slackwater.engine.request import GenerationRequest, StepOutput
from slackwater.engine.scheduler import EngineLoad
from slackwater.model.errors import RefusedError
from slackwater.policy.serving.admission import RolloutGrant
from slackwater.policy.serving.arbiter import Arbiter, DeviceUse
from slackwater.policy.serving.slack import NO_LIMIT_S, QueuedPrompt, RolloutState, ServingState
from slackwater.policy.serving.step_cost import step_work

_NO_ROLLOUT = RolloutState()
STALLS_AFTER_S = 2.0
_NO_MEMORY_REST_S = 0.02  # pause of a rollout whose step found no page


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """Time to the first token of a request, and the mean time of each later one."""

    request_id: int
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class _TokenProgress:
    arrival_s: float
    first_s: float = NO_LIMIT_S
    tokens: int = 0


class TokenTimes:
    """Token times of the service's open requests."""

    def __init__(self, tpot_s: float) -> None:
        self._tpot_s = tpot_s
        self._times: dict[int, _TokenProgress] = {}
        self._decoding: dict[int, float] = {}
        self._last_step_s = NO_LIMIT_S

    def record_arrival(self, request_id: int, now_s: float) -> None:
        self._times[request_id] = _TokenProgress(now_s)

    def record_abort(self, request_id: int) -> None:
        self._times.pop(request_id, None)
        self._decoding.pop(request_id, None)

    def record_step(
        self, output: StepOutput, now_s: float
    ) -> tuple[list[float], list[RequestLatency]]:
        """Record a step of the service; the TTFTs of its first tokens, and the ended requests."""
        decoded = not self._decoding
        first_s: list[float] = []
        for request_id in output.request_ids.tolist():
            times = self._times.get(request_id)
            if times is None:
                continue
            times.tokens += 1
            if times.tokens == 1:
                times.first_s = now_s
                first_s.append(now_s - times.arrival_s)
            else:
                decoded = True
            self._decoding[request_id] = times.first_s + self._tpot_s * times.tokens
        if decoded:
            self._last_step_s = now_s
        ended = [finished.request_id for finished in output.finished]
        ended += [failure.request_id for failure in output.failed]
        done: list[RequestLatency] = []
        for request_id in ended:
            self._decoding.pop(request_id, None)
            times = self._times.pop(request_id, None)
            if times is not None and times.tokens:
                tpot_s = (now_s - times.first_s) / max(times.tokens - 1, 1)
                done.append(RequestLatency(request_id, times.first_s - times.arrival_s, tpot_s))
        return first_s, done

    def open_requests(self, now_s: float) -> list[RequestLatency]:
        """Latencies so far of open requests; without a first token, the TTFT is the wait so far."""
        return [
            RequestLatency(
                request_id,
                (times.first_s if times.tokens else now_s) - times.arrival_s,
                (self._last_step_s - times.first_s) / max(times.tokens - 1, 1)
                if times.tokens
                else 0.0,
            )
            for request_id, times in self._times.items()
        ]

    def state(self, load: EngineLoad) -> ServingState:
        queued = []
        for request_id, tokens, computed in load.prompts:
            times = self._times.get(request_id)
            # A preempted request has had its first token: its TTFT deadline no longer applies.
            arrival_s = NO_LIMIT_S if times is None or times.tokens else times.arrival_s
            queued.append(QueuedPrompt(arrival_s, tokens, computed))
        return ServingState(
            queued,
            load.decoding,
            load.context,
            self._last_step_s if load.decoding else NO_LIMIT_S,
            min(self._decoding.values(), default=NO_LIMIT_S),
        )


@dataclass(frozen=True, slots=True)
class CoservingStep:
    """The result of one step: the service's output or the rollout's (neither: nothing may run now),
    the rollout's requests that were given back, and the service's requests that ended.
    """

    served: StepOutput | None = None
    rolled_out: StepOutput | None = None
    given_back: tuple[int, ...] = ()
    ended: tuple[RequestLatency, ...] = ()


class CoservingExecutor:
    """Runs the step that the arbiter chooses. `clock` counts seconds."""

    def __init__(self, service: Engine, arbiter: Arbiter, clock: Callable[[], float]) -> None:
        self.service, self.arbiter = service, arbiter
        self.rollout: Engine | None = None
        self._clock = clock
        self._times = TokenTimes(arbiter.slo.tpot_s)
        self._given_back: list[int] = []
        self._progress_s = self._rests_until_s = 0.0
        self.serving_s = self.rollout_s = self.needed_s = 0.0
        self.cuts = 0
        self._stopped = False
        service.arena.on_exhausted = self._free_pages_for_service

    # ---- the service ----
    def serve(self, request: GenerationRequest) -> None:
        """Add a request of the service; raises if it can never run."""
        self.service.add(request)
        now_s = self._clock()
        self._times.record_arrival(request.request_id, now_s)
        self.arbiter.record_arrival(now_s, self.service.count_uncached_tokens(request.request_id))

    def abort_served(self, request_id: int) -> None:
        self.service.abort(request_id)
        self._times.record_abort(request_id)

    def open_requests(self) -> list[RequestLatency]:
        return self._times.open_requests(self._clock())

    def keeps_slo(self) -> bool:
        """Whether the service keeps its promise lately, if the mode cares; any thread may ask."""
        return self.arbiter.keeps_slo(self._clock())

    @property
    def serving_pages(self) -> int:
        """What the service's running requests need; prefixes that it keeps beside them can go."""
        return -(-self.service.in_use_bytes // self._page_bytes)

    # ---- the rollout ----
    def reclaim_service_share(self, share: float) -> None:
        """Free up to that share of the pool's pages by evicting the service's unused prefixes."""
        self.service.reclaim_pages(int(self.arbiter.budget.capacity * share))

    def reserve_weight_pages(self, size_bytes: int) -> None:
        """A loan begins: set pages aside for the rollout's weights, or raise."""
        pages, arbiter = -(-size_bytes // self._page_bytes), self.arbiter
        arbiter.loan_weights = pages
        fits = not pages or arbiter.may_lend(self.serving_pages)
        if fits and not self._pool.set_aside(pages):
            self.service.reclaim_pages(pages)
            fits = self._pool.set_aside(pages)
        if not fits:
            arbiter.loan_weights = 0
            raise RefusedError("the service needs the memory of the rollout's weights")
        arbiter.begin_loan()

    def lend(self, rollout: Engine) -> None:
        """Let a rollout's engine on the same pool run from now on; its RL step begins."""
        if self.rollout is not None:
            raise RefusedError("the device is lent already; take it back first")
        self.rollout = rollout
        # Within its budget, the rollout has priority over the service's unused prefixes.
        rollout.arena.on_exhausted = self.service.reclaim_pages
        self._progress_s = self._clock()
        self.begin_rl_step()

    def begin_rl_step(self) -> None:
        """Start the job's next RL step with a new page budget."""
        self.arbiter.update_stopped(self._clock())
        self.arbiter.begin_step(self.serving_pages)
        self._apply_page_limits()

    def take_back(self) -> tuple[int, ...]:
        """End the loan: free the rollout's memory; its open requests, for the caller."""
        rollout = self.rollout
        self.rollout = None
        self.arbiter.end_loan()
        self.service.arena.limit = None
        if rollout is None:
            self._pool.set_aside(0)
            return ()
        while self._give_back_youngest(rollout):
            pass
        rollout.close()
        self._pool.set_aside(0)
        return self._take_given_back()

    def roll_out(self, request: GenerationRequest) -> None:
        """Add a request of the rollout; raises if it cannot run here."""
        if self.rollout is None:
            raise RefusedError("the device is not lent; the service needs it")
        if not self.rollout.busy:
            self._progress_s = self._clock()
        self.rollout.add(request)

    @property
    def stalled(self) -> bool:
        """Whether the rollout has requests that made no progress for too long."""
        waits = self.rollout is not None and self.rollout.busy
        return waits and self._clock() - self._progress_s > STALLS_AFTER_S

    @property
    def busy(self) -> bool:
        """Whether a step might compute or report something."""
        return (
            self.service.busy
            or bool(self._given_back)
            or (self.rollout is not None and self.rollout.busy)
        )

    # ---- steps ----
    def step(self) -> CoservingStep:
        now_s, rollout = self._clock(), self.rollout
        load = self.service.load()
        state = self._times.state(load)
        if self.service.busy and not state.busy:
            return self._serve(now_s)  # no work for the device: the step only reports
        shared = _NO_ROLLOUT
        if rollout is not None and now_s >= self._rests_until_s:
            rollout.evict_prefixes(now_s, now_s - self.arbiter.mode.lease_s)
            shared = self._rollout_state(rollout)
        turn = self.arbiter.next_step(now_s, state, shared)
        if self.arbiter.stopped is not self._stopped:
            self._apply_page_limits()  # the SLO is violated, or met again
        if isinstance(turn, RolloutGrant) and rollout is not None:
            return self._roll_out(rollout, turn, shared)
        if isinstance(turn, DeviceUse) and turn is not DeviceUse.REST:
            return self._serve(now_s, decode=turn is DeviceUse.SERVE)
        return CoservingStep(given_back=self._take_given_back())

    def _serve(self, now_s: float, *, decode: bool = True) -> CoservingStep:
        load = self.service.load()
        decoding, context = (load.decoding, load.context) if decode else (0, 0)
        before = self.service.tokens_computed
        output = self.service.step(decode=decode)
        ended_s = self._clock()
        rows = self.service.tokens_computed - before
        if rows:
            prompt = max(rows - decoding, 0)
            computed = load.prompts[0].computed if load.prompts else 0
            work = step_work(min(decoding, rows), context, prompt, computed)
            took_s = ended_s - now_s
            self.serving_s += took_s
            self.needed_s += self.arbiter.measure_needed_s(work, took_s)
            self.arbiter.record_service_step(work, took_s)
        first_s, ended = self._times.record_step(output, ended_s)
        for ttft_s in first_s:
            self.arbiter.record_first_token(ended_s, ttft_s)
        for latency in ended:
            self.arbiter.record_end(ended_s, latency.ttft_s, latency.tpot_s)
        self._check_memory()
        return CoservingStep(output, None, self._take_given_back(), tuple(ended))

    def _roll_out(self, rollout: Engine, grant: RolloutGrant, state: RolloutState) -> CoservingStep:
        began_s = self._clock()
        before = rollout.tokens_computed
        output = rollout.step(grant.prompt_tokens)
        ended_s = self._clock()
        rows = rollout.tokens_computed - before
        if rows:
            prompt = max(rows - state.decoding, 0)
            work = step_work(rows - prompt, state.context, prompt, state.prompt_context)
            self.rollout_s += ended_s - began_s
            self.arbiter.record_rollout_step(work, ended_s - began_s)
            self._progress_s = ended_s
        elif not output.finished:
            self._rests_until_s = ended_s + _NO_MEMORY_REST_S
        return CoservingStep(None, output, self._take_given_back())

    def _rollout_state(self, rollout: Engine) -> RolloutState:
        """The rollout's work that fits its page budget."""
        load = rollout.load()
        if not load.decoding and not load.prompts and rollout.busy:
            return RolloutState(decoding=1)  # no work: its step only reports
        tokens = sum(prompt.tokens for prompt in load.prompts)
        computed = load.prompts[0].computed if load.prompts else 0
        return RolloutState(load.decoding, load.context, tokens, computed)

    # ---- memory ----
    @property
    def _pool(self) -> PagePool:
        return self.service.arena.pool

    @property
    def _page_bytes(self) -> int:
        return self.service.config.page_bytes

    def _apply_page_limits(self) -> None:
        """Set both caches' page limits from the arbiter's budget."""
        self._stopped = self.arbiter.stopped
        self.service.arena.limit = self.arbiter.serving_limit
        if self.rollout is not None:
            self.rollout.arena.limit = self.arbiter.lent
            self._shrink(self.arbiter.lent)

    def _check_memory(self) -> None:
        if self.arbiter.record_memory_use(self.serving_pages) and self.rollout is not None:
            self.cuts += 1
            self._apply_page_limits()

    def _free_pages_for_service(self, pages: int) -> None:
        """Free the rollout's pages for the service, unless the rollout is within its budget and the
        service can evict prefixes of its own.
        """
        rollout = self.rollout
        if rollout is None:
            return
        if rollout.arena.reclaim(pages) >= pages:
            return
        within = rollout.arena.mapped_pages <= self.arbiter.lent
        if within and self.service.num_unused_prefixes:
            return
        self._shrink(max(rollout.arena.mapped_pages - pages, 0))

    def _shrink(self, pages: int) -> None:
        """Reduce the rollout to `pages` mapped pages: idle ones first, then prefixes, requests."""
        rollout = self.rollout
        assert rollout is not None
        arena = rollout.arena
        least = max(pages, self._min_pages(rollout))
        arena.reclaim(max(arena.mapped_pages - least, 0))
        while arena.mapped_pages > least:
            rollout.evict_prefixes(self._clock(), float("inf"))
            arena.reclaim(arena.mapped_pages - least)
            if arena.mapped_pages > least and not self._give_back_youngest(rollout):
                break

    def _give_back_youngest(self, rollout: Engine) -> bool:
        youngest = rollout.youngest()
        if youngest is None:
            return False
        rollout.abort(youngest)
        self._given_back.append(youngest)
        return True

    def _min_pages(self, rollout: Engine) -> int:
        """The pages of the scratch block, which an idle rollout keeps."""
        return -(-rollout.block_bytes // self._page_bytes)

    def _take_given_back(self) -> tuple[int, ...]:
        given, self._given_back = tuple(self._given_back), []
        return given

    def check_integrity(self) -> None:
        """Both engines are sound, and the rollout is within its budget."""
        self.service.check_integrity()
        if self.rollout is not None:
            self.rollout.check_integrity()
            limit = self.rollout.arena.limit
            held = self.rollout.arena.mapped_pages
            assert limit is None or held <= max(limit, self._min_pages(self.rollout))
