"""Searching through an API with a quota: the broker lets calls wait for their turn; without it,
callers run into the limit and try again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from benchmarks.actions.simulated.times import ActionTimes
from slackwater.control.actions import commands as do
from slackwater.control.actions import events as on
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.action import ActionSpec, Limit, OutcomeKind
from slackwater.model.amounts import Amounts, Need
from slackwater.model.ids import ActionId, JobId, ResourceName
from slackwater.sim.core.queue import EventQueue

WEB = ResourceName("web")
KIND = "search"


@dataclass(frozen=True, slots=True)
class SearchWorkload:
    """Calls come in bursts (a batch of trajectories thinks alike) and take about a second. Without
    a broker, a refused call is tried again up to three times, and a call that got no answer in 600
    s has failed (ARL-Tangram 6.1).
    """

    limit: Limit = field(default_factory=lambda: Limit(WEB, 200, 100, 1.0))
    seconds_mean: float = 1.0
    burst_s: float = 20.0
    burst_spread_s: float = 3.0
    retries: int = 3
    first_backoff_s: float = 1.0

    def draw(self, count: int, seed: int, load: float = 0.9) -> list[tuple[float, float]]:
        """So many calls, each when and how long; on average they ask for `load` of the quota."""
        rng = np.random.default_rng(seed)
        quota = self.limit.quota or 1
        in_burst = max(int(load * quota / self.limit.window_s * self.burst_s), 1)
        burst = np.arange(count) // in_burst
        at_s = burst * self.burst_s + np.abs(rng.normal(0, self.burst_spread_s, count))
        seconds = rng.exponential(self.seconds_mean, count)
        return sorted(zip(at_s.tolist(), seconds.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class SearchResult:
    """When calls were let through, how long each took in all, how many failed, and for how long
    calls were waiting.
    """

    times: ActionTimes
    granted_s: list[float]
    busy_s: float

    def most_in_a_window(self, window_s: float) -> int:
        """The most calls that began in any window of this length."""
        recent: deque[float] = deque()
        most = 0
        for at_s in self.granted_s:
            recent.append(at_s)
            while recent[0] <= at_s - window_s:
                recent.popleft()
            most = max(most, len(recent))
        return most


def with_broker(workload: SearchWorkload, calls: Sequence[tuple[float, float]]) -> SearchResult:
    """Calls wait for their quota."""
    broker = ActionBroker()
    queue: EventQueue[on.Event] = EventQueue()
    times, granted_s = ActionTimes(), []
    timers: dict[str, float] = {}
    busy_s, waiting_since_s = 0.0, None
    queue.push(0.0, on.LimitDeclared(0.0, workload.limit))
    for i, (at_s, _) in enumerate(calls):
        needs = (Need(WEB, Amounts.exactly(1)),)
        spec = ActionSpec(ActionId(str(i)), JobId("search"), KIND, needs)
        queue.push(at_s, on.ActionSubmitted(at_s, spec))
    while len(queue):
        event = queue.pop()
        if isinstance(event, TimerFired) and timers.get(event.name) != event.now_s:
            continue
        for command in broker.handle(event):
            match command:
                case do.StartAction(spec, attempt, _):
                    granted_s.append(queue.now_s)
                    ran_s = calls[int(spec.action)][1]
                    done = OutcomeKind.DONE
                    done_s = queue.now_s + ran_s
                    queue.push(done_s, on.ActionFinished(done_s, spec.action, attempt, done, ran_s))
                case do.EndAction(action, _):
                    times.add(int(action), KIND, queue.now_s - calls[int(action)][0])
                case SetTimer(name, at_s):
                    timers[name] = at_s
                    queue.push(max(at_s, queue.now_s), TimerFired(max(at_s, queue.now_s), name))
        if broker.state.waiting and waiting_since_s is None:
            waiting_since_s = queue.now_s
        if not broker.state.waiting and waiting_since_s is not None:
            busy_s += queue.now_s - waiting_since_s
            waiting_since_s = None
    times.finished_s = queue.now_s
    return SearchResult(times, granted_s, busy_s)


def without_broker(workload: SearchWorkload, calls: Sequence[tuple[float, float]]) -> SearchResult:
    """Every caller for himself: the API refuses what is over its limit, and the caller comes back
    after a while, or gives up.
    """
    limit = workload.limit
    queue: EventQueue[Callable[[], None]] = EventQueue()
    recent: deque[float] = deque()
    times, granted_s = ActionTimes(), []
    running = 0

    def call(i: int, tries: int) -> None:
        nonlocal running
        now_s = queue.now_s
        while recent and recent[0] <= now_s - limit.window_s:
            recent.popleft()
        over = len(recent) >= (limit.quota or 1 << 30) or running >= (limit.concurrency or 1 << 30)
        if not over:
            recent.append(now_s)
            granted_s.append(now_s)
            running += 1
            queue.push(now_s + calls[i][1], lambda: done(i))
        elif tries < workload.retries:
            queue.push(now_s + workload.first_backoff_s * 2**tries, lambda: call(i, tries + 1))
        else:
            times.failed += 1
            times.add(i, KIND, now_s - calls[i][0])

    def done(i: int) -> None:
        nonlocal running
        running -= 1
        times.add(i, KIND, queue.now_s - calls[i][0])

    for i, (at_s, _) in enumerate(calls):
        queue.push(at_s, partial(call, i, 0))
    while len(queue):
        queue.pop()()
    times.finished_s = queue.now_s
    return SearchResult(times, granted_s, 0.0)
