"""The co-serving executor: one device, two engines on one pool of pages, one step at a time (ROSE
4.1).

The arbiter says whose step is next. Pages follow the service: what it needs is taken from the
rollout at once, first idle pages, then prefixes, then whole requests, which are given back so that
they go on elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

from slackwater.engine.engine import Engine
from slackwater.engine.pages import PagePool
from slackwater.engine.request import GenerationRequest, StepOutput
from slackwater.engine.scheduler import EngineLoad
from slackwater.model.errors import RefusedError
from slackwater.policy.serving.admission import RolloutGrant
from slackwater.policy.serving.arbiter import Arbiter, Turn
from slackwater.policy.serving.slack import NO_LIMIT_S, QueuedPrompt, RolloutState, ServingState
from slackwater.policy.serving.step_cost import step_work

_NO_ROLLOUT = RolloutState()
STALLS_AFTER_S = 2.0
_NO_MEMORY_REST_S = 0.02  # a rollout whose next step finds no page is not asked again at once


@dataclass(frozen=True, slots=True)
class ServedTimes:
    """One request that is done: how long its first token took, and each one after it on average."""

    request_id: int
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class _Times:
    arrival_s: float
    first_s: float = NO_LIMIT_S
    tokens: int = 0


class TokenTimes:
    """Follows the service's requests through their steps."""

    def __init__(self, tpot_s: float) -> None:
        self._tpot_s = tpot_s
        self._times: dict[int, _Times] = {}
        self._decoding: dict[int, float] = {}
        self._last_step_s = NO_LIMIT_S

    def arrived(self, request_id: int, now_s: float) -> None:
        self._times[request_id] = _Times(now_s)

    def aborted(self, request_id: int) -> None:
        self._times.pop(request_id, None)
        self._decoding.pop(request_id, None)

    def stepped(self, output: StepOutput, now_s: float) -> tuple[list[float], list[ServedTimes]]:
        """A step of the service gave these tokens: TTFT of first ones, requests that ended."""
        self._last_step_s = now_s
        first_s: list[float] = []
        for request_id in output.request_ids.tolist():
            times = self._times.get(request_id)
            if times is None:
                continue
            times.tokens += 1
            if times.tokens == 1:
                times.first_s = now_s
                first_s.append(now_s - times.arrival_s)
            self._decoding[request_id] = times.first_s + self._tpot_s * times.tokens
        ended = [one.request_id for one in output.finished]
        ended += [one.request_id for one in output.failed]
        done: list[ServedTimes] = []
        for request_id in ended:
            self._decoding.pop(request_id, None)
            times = self._times.pop(request_id, None)
            if times is not None and times.tokens:
                tpot_s = (now_s - times.first_s) / max(times.tokens - 1, 1)
                done.append(ServedTimes(request_id, times.first_s - times.arrival_s, tpot_s))
        return first_s, done

    def under_way(self, now_s: float) -> list[ServedTimes]:
        """Requests that have not ended; one without a first token waits for it since it came."""
        return [
            ServedTimes(
                request_id,
                (times.first_s if times.tokens else now_s) - times.arrival_s,
                (self._last_step_s - times.first_s) / max(times.tokens - 1, 1)
                if times.tokens
                else 0.0,
            )
            for request_id, times in self._times.items()
        ]

    def state(self, load: EngineLoad) -> ServingState:
        """As the arbiter sees it."""
        queued = []
        for request_id, tokens, computed in load.prompts:
            times = self._times.get(request_id)
            # One that was preempted has had its first token: its promise now is the next one.
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
    """What one step did: the service's output or the rollout's, the requests of the rollout that
    were given back, and the service's requests that ended. Nobody's output: nothing may run now.
    """

    served: StepOutput | None = None
    rolled_out: StepOutput | None = None
    given_back: tuple[int, ...] = ()
    ended: tuple[ServedTimes, ...] = ()


class CoservingExecutor:
    """`clock` counts seconds; the arbiter decides everything else. Page numbers are the pool's."""

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
        service.arena.on_dry = self._service_is_dry

    # ---- the service ----
    def serve(self, request: GenerationRequest) -> None:
        """A request of the service; raises if it can never run."""
        self.service.add(request)
        now_s = self._clock()
        self._times.arrived(request.request_id, now_s)
        self.arbiter.arrived(now_s, self.service.uncached_tokens(request.request_id))

    def abort_served(self, request_id: int) -> None:
        self.service.abort(request_id)
        self._times.aborted(request_id)

    def under_way(self) -> list[ServedTimes]:
        """The service's requests that have not ended, as they stand."""
        return self._times.under_way(self._clock())

    def keeps_promise(self) -> bool:
        """Whether the service keeps its promise lately, if the mode cares; any thread may ask."""
        return self.arbiter.keeps_promise(self._clock())

    @property
    def serving_pages(self) -> int:
        """What the service's running requests need; prefixes that it keeps beside them can go."""
        return -(-self.service.in_use_bytes // self._page_bytes)

    # ---- the rollout ----
    def make_room(self, share: float) -> None:
        """Free that share of the pool's pages, as far as the service only keeps prefixes there."""
        self.service.reclaim_pages(int(self.arbiter.budget.capacity * share))

    def leave_room(self, size_bytes: int) -> None:
        """A loan begins: keep so much of the pool for the rollout's weights, or raise."""
        pages, arbiter = -(-size_bytes // self._page_bytes), self.arbiter
        arbiter.loan_weights = pages
        fits = not pages or arbiter.may_lend(self.serving_pages)
        if fits and not self._pool.set_aside(pages):
            self.service.reclaim_pages(pages)
            fits = self._pool.set_aside(pages)
        if not fits:
            arbiter.loan_weights = 0
            raise RefusedError("the service needs the memory of the rollout's weights")
        arbiter.loan_began()

    def lend(self, rollout: Engine) -> None:
        """A rollout's engine on the same pool may run from now on; its RL step begins."""
        if self.rollout is not None:
            raise RefusedError("the device is lent already; take it back first")
        self.rollout = rollout
        rollout.arena.on_dry = self._rollout_is_dry
        self._progress_s = self._clock()
        self.step_began()

    def step_began(self) -> None:
        """The job's next RL step: the budget is set anew."""
        self.arbiter.look(self._clock())
        self.arbiter.step_began(self.serving_pages)
        self._bound()

    def take_back(self) -> tuple[int, ...]:
        """The rollout leaves: its memory is the service's again, its requests the caller's."""
        rollout = self.rollout
        self.rollout = None
        self.arbiter.loan_ended()
        self.service.arena.limit = None
        if rollout is None:
            self._pool.set_aside(0)
            return ()
        while (youngest := rollout.youngest()) is not None:
            rollout.abort(youngest)
            self._given_back.append(youngest)
        rollout.close()
        self._pool.set_aside(0)
        return self._take_given_back()

    def roll_out(self, request: GenerationRequest) -> None:
        """A request of the rollout; raises if it cannot run here."""
        if self.rollout is None:
            raise RefusedError("the device is not lent; the service needs it")
        if not self.rollout.busy:
            self._progress_s = self._clock()
        self.rollout.add(request)

    @property
    def stalled(self) -> bool:
        """The rollout has requests, and nothing came of them for too long."""
        waits = self.rollout is not None and self.rollout.busy
        return waits and self._clock() - self._progress_s > STALLS_AFTER_S

    @property
    def busy(self) -> bool:
        """Whether a step might have something to do or to tell."""
        return (
            self.service.busy
            or bool(self._given_back)
            or (self.rollout is not None and self.rollout.busy)
        )

    # ---- steps ----
    def step(self) -> CoservingStep:
        """Ask the arbiter, and run what it says."""
        now_s, rollout = self._clock(), self.rollout
        load = self.service.load()
        state = self._times.state(load)
        if self.service.busy and not state.busy:
            return self._serve(now_s)  # it has only something to tell
        shared = _NO_ROLLOUT
        if rollout is not None and now_s >= self._rests_until_s:
            rollout.forget_prefixes(now_s, self.arbiter.mode.lease.expired_before(now_s))
            shared = self._rollout_state(rollout)
        turn = self.arbiter.next_step(now_s, state, shared)
        if self.arbiter.stopped is not self._stopped:
            self._bound()  # its promise is broken, or is kept again
        if isinstance(turn, RolloutGrant) and rollout is not None:
            return self._roll_out(rollout, turn, shared)
        if turn is Turn.SERVE:
            return self._serve(now_s)
        return CoservingStep(given_back=self._take_given_back())

    def _serve(self, now_s: float) -> CoservingStep:
        load = self.service.load()
        before = self.service.gauges()["tokens_computed"]
        output = self.service.step()
        ended_s = self._clock()
        rows = int(self.service.gauges()["tokens_computed"] - before)
        if rows:
            prompt = max(rows - load.decoding, 0)
            computed = load.prompts[0].computed if load.prompts else 0
            work = step_work(min(load.decoding, rows), load.context, prompt, computed)
            took_s = ended_s - now_s
            self.serving_s += took_s
            self.needed_s += self.arbiter.needed_s(work, took_s)
            self.arbiter.served(work, took_s)
        first_s, ended = self._times.stepped(output, ended_s)
        for ttft_s in first_s:
            self.arbiter.first_token(ended_s, ttft_s)
        for one in ended:
            self.arbiter.ended(ended_s, one.ttft_s, one.tpot_s)
        self._check_memory()
        return CoservingStep(output, None, self._take_given_back(), tuple(ended))

    def _roll_out(self, rollout: Engine, grant: RolloutGrant, state: RolloutState) -> CoservingStep:
        began_s = self._clock()
        before = rollout.gauges()["tokens_computed"]
        output = rollout.step(grant.prompt_tokens)
        ended_s = self._clock()
        rows = int(rollout.gauges()["tokens_computed"] - before)
        if rows:
            prompt = max(rows - state.decoding, 0)
            work = step_work(rows - prompt, state.context, prompt, state.prompt_context)
            self.rollout_s += ended_s - began_s
            self.arbiter.rolled_out(work, ended_s - began_s)
            self._progress_s = ended_s
        elif not output.finished:
            self._rests_until_s = ended_s + _NO_MEMORY_REST_S
        return CoservingStep(None, output, self._take_given_back())

    def _rollout_state(self, rollout: Engine) -> RolloutState:
        """What it could run within its budget: without memory there is no work."""
        load = rollout.load()
        if not load.decoding and not load.prompts and rollout.busy:
            return RolloutState(decoding=1)  # it has only something to tell
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

    def _bound(self) -> None:
        """Tell both caches how much they may have."""
        self._stopped = self.arbiter.stopped
        self.service.arena.limit = self.arbiter.serving_limit
        if self.rollout is not None:
            self.rollout.arena.limit = self.arbiter.lent
            self._shrink(self.arbiter.lent)

    def _check_memory(self) -> None:
        if self.arbiter.uses(self.serving_pages) and self.rollout is not None:
            self.cuts += 1
            self._bound()

    def _service_is_dry(self, pages: int) -> None:
        """The pool has no page for the service: the rollout gives up as many, unless it may keep
        them and the service has prefixes of its own to forget instead.
        """
        rollout = self.rollout
        if rollout is None:
            return
        if rollout.arena.reclaim(pages) >= pages:
            return
        within = rollout.arena.mapped_pages <= self.arbiter.lent
        if within and self.service.unused_prefixes:
            return
        self._shrink(max(rollout.arena.mapped_pages - pages, 0))

    def _rollout_is_dry(self, pages: int) -> None:
        """Within its budget the rollout goes before prefixes that the service only keeps."""
        self.service.reclaim_pages(pages)

    def _shrink(self, pages: int) -> None:
        """Bring the rollout down to so many mapped pages: idle ones, prefixes, then requests."""
        rollout = self.rollout
        assert rollout is not None
        arena = rollout.arena
        least = max(pages, self._least_pages(rollout))
        surplus = arena.mapped_pages - least
        if surplus > 0:
            arena.reclaim(surplus)
        if arena.mapped_pages > least:
            now_s = self._clock()
            rollout.forget_prefixes(now_s, float("inf"))
            arena.reclaim(arena.mapped_pages - least)
        while arena.mapped_pages > least:
            youngest = rollout.youngest()
            if youngest is None:
                break
            rollout.abort(youngest)
            self._given_back.append(youngest)
            rollout.forget_prefixes(self._clock(), float("inf"))
            arena.reclaim(arena.mapped_pages - least)

    def _least_pages(self, rollout: Engine) -> int:
        """The scratch block's: what an idle rollout holds."""
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
            assert limit is None or held <= max(limit, self._least_pages(self.rollout))
