"""A simulated engine: continuous batching in virtual time, advanced in closed form between changes.

Prefill goes first and holds decoding up; then all running turns gain one token a step. A step's
length grows linearly with the context it reads, so the time of k steps is a quadratic in k: no
step is simulated by itself. When the cache is full the youngest turn is preempted and prefilled
again later.
"""

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from slackwater.model.ids import TrajectoryId
from slackwater.sim.rollout.engine_cost import CostModel

_DONE = 1e-9


@dataclass(slots=True)
class Request:
    """An attempt in the engine: `goal_tokens` to make after `base_tokens`, of which
    `reported_tokens` were streamed.
    """

    attempt: int
    trajectory: TrajectoryId
    base_tokens: int
    goal_tokens: int
    made_tokens: float = 0.0
    reported_tokens: int = 0
    started_step: float = 0.0

    @property
    def finish_step(self) -> float:
        return self.started_step + self.goal_tokens

    @property
    def context_tokens(self) -> int:
        return self.base_tokens + int(self.made_tokens)


class SimulatedEngine:
    """Holds requests and advances them in time; it knows no controller."""

    def __init__(
        self,
        cost: CostModel,
        max_running: int,
        now_s: float,
        *,
        slowdown: float = 1.0,
    ) -> None:
        self.cost = cost
        self.max_running = max_running
        self.now_s = now_s
        self.slowdown = slowdown
        self.kv_tokens = cost.kv_tokens
        self.requests: dict[int, Request] = {}
        self.produced = 0.0
        self.prefilled = 0
        self._steps = 0.0
        self._running: dict[int, Request] = {}
        self._running_context = 0.0
        self._finishes: list[tuple[float, int]] = []
        self._waiting: deque[Request] = deque()
        self._prefilling: deque[tuple[Request, float]] = deque()
        self._prefilling_context = 0
        self._cache: OrderedDict[TrajectoryId, int] = OrderedDict()
        self._cached_tokens = 0

    @property
    def running(self) -> int:
        return len(self._running) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_used_tokens(self) -> int:
        return int(self._running_context) + self._prefilling_context

    @property
    def stalled(self) -> bool:
        """Whether it reports that it makes no progress."""
        return False

    def add(self, request: Request) -> None:
        """Queue a request; it runs when there is room."""
        self.requests[request.attempt] = request
        self._waiting.append(request)
        self._admit()

    def abort(self, attempt: int) -> Request | None:
        """Forget a request; its cache stays as a prefix."""
        request = self.requests.pop(attempt, None)
        if request is None:
            return None
        if attempt in self._running:
            self._leave(request)
            self._keep_prefix(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            self._prefilling = deque(row for row in self._prefilling if row[0] is not request)
            self._prefilling_context -= request.context_tokens
        self._admit()
        return request

    def resize(self, max_running: int, kv_tokens: int) -> None:
        """Set another budget; drop prefixes that no longer fit."""
        self.max_running, self.kv_tokens = max(max_running, 1), max(kv_tokens, 1)
        self._trim_cache()

    def advance(self, to_s: float) -> list[Request]:
        """Work until `to_s`; return the requests that finished, in order."""
        finished: list[Request] = []
        while self.now_s < to_s - _DONE:
            until_s = min(self.next_change_s(), to_s)
            if self._prefilling:
                self._prefill(until_s)
            elif self._running:
                self._decode(until_s)
                finished += self._finish()
            else:
                self.now_s = to_s
            self._admit()
        self.now_s = max(self.now_s, to_s)
        return finished

    def settle(self) -> None:
        """Bring every running request's progress up to date."""
        for request in self._running.values():
            self._progress(request)

    def next_change_s(self) -> float:
        """When the batch changes next by itself, infinity if it does not."""
        if self._prefilling:
            return self.now_s + self._prefilling[0][1]
        if not self._running:
            return math.inf
        steps = self._next_finish_step() - self._steps
        full = (self.kv_tokens - self._running_context) / len(self._running)
        if 0 < full < steps:
            steps = full
        return self.now_s + self._time_of(max(steps, 0.0))

    def _next_finish_step(self) -> float:
        while True:
            step, attempt = self._finishes[0]
            request = self._running.get(attempt)
            if request is not None and request.finish_step == step:
                return step
            heapq.heappop(self._finishes)  # it left before

    def _time_of(self, steps: float) -> float:
        batch = len(self._running)
        per_step = self.cost.step_s(batch) + self.cost.context_s * self._running_context
        growth = self.cost.context_s * batch / 2
        return self.slowdown * (per_step * steps + growth * steps * steps)

    def _steps_in(self, seconds: float) -> float:
        batch = len(self._running)
        per_step = self.cost.step_s(batch) + self.cost.context_s * self._running_context
        growth = self.cost.context_s * batch / 2
        seconds /= self.slowdown
        return 2 * seconds / (per_step + math.sqrt(per_step * per_step + 4 * growth * seconds))

    def _prefill(self, until_s: float) -> None:
        request, left_s = self._prefilling[0]
        spent_s = until_s - self.now_s
        self.now_s = until_s
        if left_s - spent_s > _DONE:
            self._prefilling[0] = (request, left_s - spent_s)
            return
        self._prefilling.popleft()
        self._prefilling_context -= request.context_tokens
        request.started_step = self._steps - request.made_tokens
        self._running[request.attempt] = request
        heapq.heappush(self._finishes, (request.finish_step, request.attempt))
        self._running_context += request.base_tokens + request.made_tokens

    def _decode(self, until_s: float) -> None:
        steps = self._steps_in(until_s - self.now_s)
        self.now_s = until_s
        self._steps += steps
        made = steps * len(self._running)
        self._running_context += made
        self.produced += made

    def _progress(self, request: Request) -> None:
        request.made_tokens = min(self._steps - request.started_step, float(request.goal_tokens))

    def _finish(self) -> list[Request]:
        done: list[Request] = []
        while self._running and self._next_finish_step() - self._steps <= 1e-6:
            _, attempt = heapq.heappop(self._finishes)
            request = self._running[attempt]
            done.append(request)
            self._leave(request)
            request.made_tokens = float(request.goal_tokens)
            self._keep_prefix(request)
            del self.requests[request.attempt]
        while len(self._running) > 1 and self._running_context >= self.kv_tokens - 1e-3:
            self._preempt()
        return done

    def _preempt(self) -> None:
        """Requeue the youngest in front; what it has streamed is prefilled again."""
        request = next(reversed(self._running.values()))
        self._leave(request)
        self._waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self._progress(request)
        del self._running[request.attempt]
        self._running_context = max(
            self._running_context - (request.base_tokens + request.made_tokens), 0.0
        )
        if not self._running:
            self._running_context = 0.0

    def _admit(self) -> None:
        while self._waiting and self.running < self.max_running:
            request = self._waiting[0]
            used = self.kv_used_tokens
            if self.running and used + request.context_tokens > 0.95 * self.kv_tokens:
                return
            self._waiting.popleft()
            cached = self._cache.pop(request.trajectory, 0)
            self._cached_tokens -= cached
            fresh = request.context_tokens - min(cached, request.context_tokens - 1)
            self.prefilled += fresh
            self._prefilling_context += request.context_tokens
            cost_s = self.slowdown * self.cost.prefill_s(fresh, request.context_tokens)
            self._prefilling.append((request, cost_s))
            self._trim_cache()

    def _keep_prefix(self, request: Request) -> None:
        self._cached_tokens -= self._cache.pop(request.trajectory, 0)
        self._cache[request.trajectory] = request.context_tokens
        self._cached_tokens += request.context_tokens
        self._trim_cache()

    def _trim_cache(self) -> None:
        room = self.kv_tokens - self.kv_used_tokens
        while self._cached_tokens > room and self._cache:
            _, tokens = self._cache.popitem(last=False)
            self._cached_tokens -= tokens
