"""The rollout's share of a serving device: an engine that the arbiter lets step."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable

from slackwater.model.ids import TrajectoryId
from slackwater.policy.serving.slack import RolloutState
from slackwater.policy.serving.step_cost import StepWork, step_work
from slackwater.sim.rollout.engine_cost import CostModel
from slackwater.sim.rollout.simulated_engine import Request, SimulatedEngine


class RolloutShare(SimulatedEngine):
    """A simulated engine with a budget of `kv_tokens` that moves on by `begin_step` and `end_step`;
    prefixes of ended turns stay for `lease_s`, if there is room.
    """

    def __init__(
        self, cost: CostModel, max_running: int, now_s: float, kv_tokens: int, lease_s: float
    ) -> None:
        super().__init__(cost, max_running, now_s)
        self.kv_tokens = kv_tokens
        self._lease_s = lease_s
        self._queue: deque[Request] = deque()
        self._chunked: OrderedDict[int, tuple[Request, int]] = OrderedDict()
        self._decodes: dict[int, Request] = {}
        self._held_context = 0
        self._step = 0
        self._ends: list[tuple[int, int]] = []
        self._began: dict[int, int] = {}
        self._prefixes: OrderedDict[TrajectoryId, tuple[int, float]] = OrderedDict()
        self._prefix_tokens = 0
        self._ready: list[Request] = []
        self._plan: list[tuple[Request, int]] = []
        self.progress_s = now_s
        self.stalls_after_s = 2.0
        self.on_work: Callable[[], None] = lambda: None

    # ---- the engine's interface ----
    @property
    def running(self) -> int:
        return len(self._decodes) + len(self._chunked)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def kv_used_tokens(self) -> int:
        return self._held_context

    @property
    def prefix_tokens(self) -> int:
        return self._prefix_tokens

    @property
    def stalled(self) -> bool:
        """Whether its turns made no progress for too long (ROSE 4.1: 2 s)."""
        return bool(self.requests) and self.now_s - self.progress_s > self.stalls_after_s

    def add(self, request: Request) -> None:
        if not self.requests:
            self.progress_s = self.now_s
        self.requests[request.attempt] = request
        self._queue.append(request)
        self.on_work()

    def abort(self, attempt: int) -> Request | None:
        request = self.requests.pop(attempt, None)
        if request is None:
            return None
        if attempt in self._decodes:
            self.settle()
            del self._decodes[attempt]
            self._held_context -= request.context_tokens
            del self._began[attempt]
            self._keep(request)
        elif attempt in self._chunked:
            del self._chunked[attempt]
            self._held_context -= request.context_tokens
        elif request in self._queue:
            self._queue.remove(request)
        return request

    def resize(self, max_running: int, kv_tokens: int) -> None:
        self.max_running, self.kv_tokens = max(max_running, 0), max(kv_tokens, 0)

    def advance(self, to_s: float) -> list[Request]:
        """Return the requests that ended since the last call; steps advance the time."""
        self.now_s = max(self.now_s, to_s)
        ready, self._ready = self._ready, []
        return ready

    def settle(self) -> None:
        for attempt, request in self._decodes.items():
            request.made_tokens = float(min(self._step - self._began[attempt], request.goal_tokens))

    def next_change_s(self) -> float:
        return float("inf")

    # ---- steps ----
    def state(self) -> RolloutState:
        """The rollout's state, for the arbiter, after admitting requests that fit the budget."""
        self._enter()
        left = context = 0
        for request, tokens in self._chunked.values():
            left += tokens
            context = context or request.context_tokens - tokens
        decode_context = self._held_context - sum(
            request.context_tokens for request, _ in self._chunked.values()
        )
        return RolloutState(len(self._decodes), max(decode_context, 0), left, context)

    def begin_step(self, prompt_tokens: int) -> StepWork:
        """Begin a step of all decoding requests and so many prompt tokens, oldest first."""
        self._plan, left = [], prompt_tokens
        context = 0
        for request, tokens in self._chunked.values():
            taken = min(tokens, left)
            if taken <= 0:
                break
            context = context or request.context_tokens - tokens
            self._plan.append((request, taken))
            left -= taken
        decode_context = self._held_context - sum(
            request.context_tokens for request, _ in self._chunked.values()
        )
        return step_work(len(self._decodes), decode_context, prompt_tokens - left, context)

    def end_step(self, now_s: float) -> bool:
        """End the step; return whether a turn ended in it."""
        self.now_s = self.progress_s = now_s
        self._step += 1
        self.produced += len(self._decodes)
        self._held_context += len(self._decodes)
        while self._ends and self._ends[0][0] <= self._step:
            step, attempt = heapq.heappop(self._ends)
            request = self._decodes.get(attempt)
            if request is not None and self._began[attempt] + request.goal_tokens == step:
                self._end(request)
        for request, taken in self._plan:
            entry = self._chunked.get(request.attempt)
            if entry is None:
                continue  # aborted while the step ran
            self.prefilled += taken
            tokens = entry[1] - taken
            if tokens > 0:
                self._chunked[request.attempt] = (request, tokens)
                continue
            del self._chunked[request.attempt]
            self._decodes[request.attempt] = request
            began = self._step - int(request.made_tokens)
            self._began[request.attempt] = began
            heapq.heappush(self._ends, (began + request.goal_tokens, request.attempt))
        self._plan = []
        return bool(self._ready)

    def expire(self, now_s: float) -> None:
        """Drop prefixes whose lease has ended."""
        while self._prefixes:
            name, (tokens, kept_s) = next(iter(self._prefixes.items()))
            if kept_s + self._lease_s > now_s:
                return
            del self._prefixes[name]
            self._prefix_tokens -= tokens

    def give_up(self, tokens: int) -> list[Request]:
        """Free memory until at most `tokens` are held: prefixes first, then whole requests,
        youngest first, which the caller reports.
        """
        self._shrink_prefixes(tokens)
        given: list[Request] = []
        order = [*self._chunked, *self._decodes]
        while self._held_context > tokens and order:
            request = self.requests[max(order)]
            order.remove(request.attempt)
            self.settle()
            self.abort(request.attempt)
            given.append(request)
            self._shrink_prefixes(tokens)
        return given

    def _enter(self) -> None:
        """Admit waiting requests while their contexts and one token each fit the budget."""
        while self._queue and self.running < self.max_running:
            request = self._queue[0]
            needed = request.context_tokens + self.running + 1
            if self._held_context + needed > self.kv_tokens:
                return
            self._queue.popleft()
            cached, _ = self._prefixes.pop(request.trajectory, (0, 0.0))
            self._prefix_tokens -= cached
            fresh = max(request.context_tokens - min(cached, request.context_tokens - 1), 1)
            self._chunked[request.attempt] = (request, fresh)
            self._held_context += request.context_tokens
            self._shrink_prefixes(self.kv_tokens)

    def _end(self, request: Request) -> None:
        del self._decodes[request.attempt], self._began[request.attempt]
        del self.requests[request.attempt]
        self._held_context -= request.base_tokens + request.goal_tokens
        request.made_tokens = float(request.goal_tokens)
        self._ready.append(request)
        self._keep(request)

    def _keep(self, request: Request) -> None:
        if self._lease_s <= 0:
            return
        old, _ = self._prefixes.pop(request.trajectory, (0, 0.0))
        tokens = request.context_tokens
        self._prefixes[request.trajectory] = (tokens, self.now_s)
        self._prefix_tokens += tokens - old
        self._shrink_prefixes(self.kv_tokens)

    def _shrink_prefixes(self, limit: int) -> None:
        while self._prefixes and self._held_context + self._prefix_tokens > limit:
            _, (tokens, _) = self._prefixes.popitem(last=False)
            self._prefix_tokens -= tokens
