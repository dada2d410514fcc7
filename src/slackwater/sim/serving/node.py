"""One simulated serving device: the service, the borrowing rollout, and the arbiter."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slackwater.model.ids import NodeId
from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.admission import RolloutGrant
from slackwater.policy.serving.arbiter import Arbiter, DeviceUse
from slackwater.policy.serving.modes import LendingMode
from slackwater.policy.serving.slack import RolloutState
from slackwater.sim.rollout.engine_cost import SharedDevice, step_cost_of
from slackwater.sim.rollout.simulated_engine import Request
from slackwater.sim.serving.rollout_share import RolloutShare
from slackwater.sim.serving.service_share import ServedRequest, ServiceShare

_IDLE = RolloutState()
_DRAWN_AT_ONCE = 256
_STEP_TOKENS = 2048  # of one step of the service


@dataclass(slots=True)
class NodeUse:
    """A device's time by use; `needed_s` is the least that the service could do with."""

    serving_s: float = 0.0
    rollout_s: float = 0.0
    needed_s: float = 0.0
    reported_s: float = 0.0
    rollout_reported_s: float = 0.0
    cuts: int = 0
    given_back: int = 0


class ServingNode:
    """Runs one step after the other on the event queue, by itself."""

    def __init__(
        self,
        name: NodeId,
        device: SharedDevice,
        slo: ServingSlo,
        mode: LendingMode,
        at: Callable[[float, Callable[[], None]], None],
        seed: int,
    ) -> None:
        self.name, self.device = name, device
        self._at = at
        self._rng = np.random.default_rng(seed)
        self._noise = device.noise
        self._drawn: list[float] = []
        self.use = NodeUse()
        self._serving_cost = step_cost_of(device.serving)
        self._rollout_cost = step_cost_of(device.rollout)
        prompt = self._serving_cost.prompt
        self._token_s = prompt.seconds[-1] / prompt.rows[-1]
        self._bytes = device.serving.model.kv_bytes_per_token
        self._rollout_bytes = device.rollout.model.kv_bytes_per_token
        self.arbiter = Arbiter(
            mode,
            slo,
            self._serving_cost,
            self._rollout_cost,
            capacity=device.kv_bytes,
            loan_weights=int(device.rollout.weight_bytes) if mode.lends else 0,
            step_tokens=_STEP_TOKENS,
        )
        self.service = ServiceShare(_STEP_TOKENS, slo.tpot_s, 0)
        self.rollout: RolloutShare | None = None
        self._running = self._stopped = False
        self.slowdown = 1.0
        self.on_first: Callable[[ServedRequest, float], None] = lambda request, now_s: None
        self.on_done: Callable[[ServedRequest], None] = lambda request: None
        self.on_turns_ended: Callable[[], None] = lambda: None
        self.on_given_back: Callable[[list[Request], int], None] = lambda requests, lent: None
        self._set_limit()

    # ---- the service ----
    def arrive(self, request: ServedRequest, now_s: float) -> None:
        """A request for the service."""
        self.arbiter.record_arrival(now_s, request.prompt_tokens - request.cached_tokens)
        self.service.add(request)
        self.wake(now_s)

    @property
    def load(self) -> float:
        """Roughly the seconds of queued work, which a router compares."""
        service = self.service
        waiting = sum(request.prompt_tokens - request.computed_tokens for request in service.queue)
        return waiting * self._token_s + (0.001 * len(service.decoding))

    # ---- the rollout ----
    def make_room(self) -> bool:
        """Reserve memory for the rollout's weights; return whether there is enough."""
        if not self.arbiter.may_lend(self._serving_bytes()):
            return False
        self.arbiter.begin_loan()
        self._set_limit()
        return True

    def lend(self, rollout: RolloutShare, now_s: float) -> None:
        """Start the loan once the rollout's weights are loaded, with an RL step's budget."""
        self.arbiter.update_stopped(now_s)
        self.arbiter.begin_loan()
        self.arbiter.begin_step(self._serving_bytes())
        self.rollout = rollout
        self._set_limit()
        rollout.resize(rollout.max_running, self._loan_tokens())
        self.wake(now_s)

    def begin_step(self, now_s: float) -> tuple[list[Request], int]:
        """Begin the job's next RL step with a new budget; the requests above it, and its tokens."""
        rollout = self.rollout
        assert rollout is not None
        self.arbiter.update_stopped(now_s)
        self.arbiter.begin_step(self._serving_bytes())
        rollout.now_s = max(rollout.now_s, now_s)
        rollout.resize(rollout.max_running, self._loan_tokens())
        given = rollout.give_up(self._loan_tokens())
        self.use.given_back += len(given)
        self.wake(now_s)
        return given, self._loan_tokens()

    def take_back(self) -> None:
        """End the loan."""
        self.rollout = None
        self.arbiter.end_loan()
        self._set_limit()

    def kv_share(self) -> float:
        """The largest share of the memory that the service used since the last look."""
        peak, self.service.peak_tokens = self.service.peak_tokens, self.service.kv_tokens
        return self.arbiter.kv_share(int(peak * self._bytes))

    def busy_share(self, seconds: float) -> float:
        """The share of the last `seconds` that the service needed, decode steps at its pace."""
        spent_s = self.use.needed_s - self.use.reported_s
        self.use.reported_s = self.use.needed_s
        return min(spent_s / seconds, 1.0)

    def rollout_share(self, seconds: float) -> float:
        """The share of the last `seconds` that rollouts had."""
        spent_s, self.use.rollout_reported_s = (
            self.use.rollout_s - self.use.rollout_reported_s,
            self.use.rollout_s,
        )
        return min(spent_s / seconds, 1.0)

    # ---- steps ----
    def wake(self, now_s: float) -> None:
        """Begin a step if none runs."""
        if not self._running:
            self._next(now_s)

    def _next(self, now_s: float) -> None:
        rollout = self.rollout
        if rollout is not None:
            rollout.now_s = max(rollout.now_s, now_s)
            rollout.expire(now_s)
            shared = rollout.state()
        else:
            shared = _IDLE
        step = self.arbiter.next_step(now_s, self.service.state(), shared)
        if self.arbiter.stopped is not self._stopped:
            self._apply_stop()
        if isinstance(step, RolloutGrant):
            assert rollout is not None
            self._roll_out(rollout, step, now_s)
        elif step is not DeviceUse.REST:
            self._serve(now_s, decode=step is DeviceUse.SERVE)
        else:
            self._running = False

    def _serve(self, now_s: float, *, decode: bool) -> None:
        work = self.service.begin_step(decode=decode)
        if not work.rows:
            self._running = False
            return
        self._running = True
        took_s = self._serving_cost.step_s(work) * self._noise_factor()

        def end_step() -> None:
            ended_s = now_s + took_s
            self.use.serving_s += took_s
            self.use.needed_s += self.arbiter.measure_needed_s(work, took_s)
            self.arbiter.record_service_step(work, took_s)
            first, done = self.service.end_step(ended_s)
            for request in first:
                if not request.preempted:
                    self.arbiter.record_first_token(ended_s, request.ttft_s)
                self.on_first(request, ended_s)
            for request in done:
                self.arbiter.record_end(ended_s, request.ttft_s, request.tpot_s)
                self.on_done(request)
            self._check_memory(ended_s)
            self._next(ended_s)

        self._at(now_s + took_s, end_step)

    def _roll_out(self, rollout: RolloutShare, grant: RolloutGrant, now_s: float) -> None:
        self._running = True
        work = rollout.begin_step(grant.prompt_tokens)
        took_s = self._rollout_cost.step_s(work) * self._noise_factor()

        def end_step() -> None:
            ended_s = now_s + took_s
            self.use.rollout_s += took_s
            self.arbiter.record_rollout_step(work, took_s)
            if rollout.end_step(ended_s) and self.rollout is rollout:
                self.on_turns_ended()
            self._check_memory(ended_s)
            self._next(ended_s)

        self._at(now_s + took_s, end_step)

    def _noise_factor(self) -> float:
        if not self._drawn:
            self._drawn = np.exp(self._rng.normal(0.0, self._noise, _DRAWN_AT_ONCE))[::-1].tolist()
        return self.slowdown * self._drawn.pop()

    # ---- memory ----
    def _serving_bytes(self) -> int:
        return int(self.service.kv_tokens * self._bytes)

    def _loan_tokens(self) -> int:
        return int(self.arbiter.lent / self._rollout_bytes)

    def _set_limit(self) -> None:
        """Set the KV tokens that the service may use."""
        self.service.limit_tokens = int(self.arbiter.serving_limit / self._bytes)

    def _apply_stop(self) -> None:
        """Rollouts must stop, or may go on: set their memory accordingly."""
        self._stopped = self.arbiter.stopped
        rollout = self.rollout
        if rollout is not None:
            rollout.resize(rollout.max_running, self._loan_tokens())
            given = rollout.give_up(self._loan_tokens())
            self.use.given_back += len(given)
            self.on_given_back(given, self._loan_tokens())

    def _check_memory(self, now_s: float) -> None:
        """Cut the rollouts' memory by the service's use; requests that must go are reported."""
        rollout = self.rollout
        served = self._serving_bytes()
        pressed = self.arbiter.record_memory_use(served)
        if rollout is None:
            return
        rollout.now_s = max(rollout.now_s, now_s)
        allowed = self._loan_tokens()
        if self.arbiter.mode.memory == "preemptive":
            free = self.arbiter.budget.capacity - served
            allowed = min(allowed, int(max(free, 0) / self._rollout_bytes))
        if pressed:
            self.use.cuts += 1
            rollout.resize(rollout.max_running, self._loan_tokens())
        if pressed or rollout.kv_used_tokens + rollout.prefix_tokens > allowed:
            given = rollout.give_up(allowed)
            self.use.given_back += len(given)
            if given or pressed:
                self.on_given_back(given, self._loan_tokens())
