"""The service's share of a device: prompts by arrival, then decoding in one batch."""

import heapq
from collections import deque
from dataclasses import dataclass, field

from slackwater.policy.serving.slack import NO_LIMIT_S, QueuedPrompt, ServingState
from slackwater.policy.serving.step_cost import StepWork


@dataclass(slots=True)
class ServedRequest:
    """One request of the service: its `number` in the trace, and times, NaN until known."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    computed_tokens: int = 0
    first_token_s: float = float("nan")
    done_s: float = float("nan")
    began_step: int = 0
    preempted: int = 0
    admitted: bool = False
    goal_tokens: int = 0
    queued: QueuedPrompt = field(init=False)  # as it stands in the queue

    def __post_init__(self) -> None:
        self.goal_tokens = self.output_tokens
        self.describe_prompt()

    def describe_prompt(self) -> None:
        """Set `queued`, which every step reads of every request in the queue."""
        known = max(self.computed_tokens, self.cached_tokens)
        self.queued = QueuedPrompt(self.arrival_s, self.prompt_tokens - known, known)

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.done_s - self.first_token_s) / max(self.goal_tokens - 1, 1)


class ServiceShare:
    """Queue, batch and memory of the service on one device; `limit` bounds its KV tokens."""

    def __init__(self, step_tokens: int, tpot_s: float, limit_tokens: int) -> None:
        self._step_tokens, self._tpot_s = step_tokens, tpot_s
        self.limit_tokens = limit_tokens
        self.queue: deque[ServedRequest] = deque()
        self.decoding: dict[int, ServedRequest] = {}
        self.kv_tokens = 0
        self.peak_tokens = 0
        self.preemptions = 0
        self._steps = 0
        self._context = 0
        self._finishes: list[tuple[int, int]] = []
        self._dues: list[tuple[float, int]] = []
        self._last_step_s = NO_LIMIT_S
        self._chunk: list[tuple[ServedRequest, int]] = []
        self._decodes = True

    @property
    def busy(self) -> bool:
        return bool(self.queue) or bool(self.decoding)

    def add(self, request: ServedRequest) -> None:
        self.queue.append(request)

    def state(self) -> ServingState:
        """The service's state, for the arbiter."""
        runnable = self._admissible()
        queued = [request.queued for request in self.queue] if runnable or self.decoding else []
        due_s = NO_LIMIT_S
        while self._dues and self._dues[0][1] not in self.decoding:
            heapq.heappop(self._dues)
        if self._dues:
            due_s = self._dues[0][0] + self._tpot_s * (self._steps + 1)
        oldest_s = self._last_step_s if self.decoding else NO_LIMIT_S
        return ServingState(queued, len(self.decoding), self._context, oldest_s, due_s)

    def _admissible(self) -> bool:
        """Whether the first prompt in the queue has memory; a lone one always has."""
        if not self.queue:
            return False
        first = self.queue[0]
        if first.admitted or not self.kv_tokens:
            return True
        return self.kv_tokens + first.prompt_tokens <= self.limit_tokens

    def begin_step(self, *, decode: bool = True) -> StepWork:
        """Choose the next step's rows: all decoding ones, then prompts until it is full. Without
        `decode` the former stay out if a prompt can run.
        """
        decoding = len(self.decoding) if decode else 0
        room = max(self._step_tokens - decoding, 0)
        rows, prompt_pairs = decoding, 0.0
        self._chunk, self._decodes = [], decode
        for request in self.queue:
            if not request.admitted:
                fits = self.kv_tokens + request.prompt_tokens <= self.limit_tokens
                if self.kv_tokens and not fits:
                    break
                if room <= 0:
                    break
                self.kv_tokens += request.prompt_tokens
                request.admitted, request.computed_tokens = True, request.cached_tokens
            tokens = min(room, request.prompt_tokens - request.computed_tokens)
            if tokens <= 0:
                break
            self._chunk.append((request, tokens))
            prompt_pairs += tokens * (request.computed_tokens + tokens / 2)
            rows, room = rows + tokens, room - tokens
        if not decode and not rows:
            return self.begin_step()
        self.peak_tokens = max(self.peak_tokens, self.kv_tokens + len(self.decoding))
        return StepWork(rows, float(self._context) if decode else 0.0, prompt_pairs)

    def end_step(self, now_s: float) -> tuple[list[ServedRequest], list[ServedRequest]]:
        """End the step; return requests with their first token, and requests that are done."""
        if self._decodes:
            self._steps += 1
            self._last_step_s = now_s
            count = len(self.decoding)
            self._context += count
            self.kv_tokens += count
        done: list[ServedRequest] = []
        while self._finishes and self._finishes[0][0] <= self._steps:
            step, number = heapq.heappop(self._finishes)
            request = self.decoding.get(number)
            if request is not None and request.began_step + request.output_tokens - 1 == step:
                self._leave(request)
                request.done_s = now_s
                done.append(request)
        first: list[ServedRequest] = []
        for request, tokens in self._chunk:
            request.computed_tokens += tokens
            request.describe_prompt()
            if request.computed_tokens >= request.prompt_tokens:
                self.queue.remove(request)
                if request.preempted == 0:
                    request.first_token_s = now_s
                first.append(request)
        self._chunk = []
        self._preempt()
        return first, done

    def decode(self, request: ServedRequest, now_s: float) -> bool:
        """Let a prefilled request decode here; False if its one token was all."""
        if request.output_tokens <= 1:
            self.kv_tokens -= request.prompt_tokens
            request.done_s = now_s
            return False
        if not self.decoding:
            self._last_step_s = now_s
        request.began_step = self._steps
        self.decoding[request.number] = request
        self._context += request.prompt_tokens + 1
        self.kv_tokens += 1
        heapq.heappush(self._finishes, (self._steps + request.output_tokens - 1, request.number))
        due_s = request.first_token_s - self._tpot_s * self._steps
        heapq.heappush(self._dues, (due_s, request.number))
        return True

    def _leave(self, request: ServedRequest) -> None:
        del self.decoding[request.number]
        made = self._steps - request.began_step
        self._context -= request.prompt_tokens + 1 + made
        self.kv_tokens -= request.prompt_tokens + 1 + made

    def _preempt(self) -> None:
        """While memory is full, requeue the youngest; its tokens become part of its prompt."""
        while self.kv_tokens + len(self.decoding) > self.limit_tokens and len(self.decoding) > 1:
            request = self.decoding[next(reversed(self.decoding))]
            made = self._steps - request.began_step
            self._leave(request)
            self.preemptions += 1
            request.preempted += 1
            request.prompt_tokens += 1 + made
            request.output_tokens -= 1 + made
            request.computed_tokens = request.cached_tokens = 0
            request.admitted = False
            request.describe_prompt()
            self.queue.appendleft(request)
