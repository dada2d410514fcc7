"""Executes grants and ends of permits: wakes their waiters, and draws them on a timeline."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from slackwater.control.coschedule import commands
from slackwater.control.jobs.events import JobCrashed
from slackwater.model.ids import JobId
from slackwater.model.placement import Phase
from slackwater.runtime.live_driver import FleetDriver, loop_time
from slackwater.runtime.net.background import wait_until_set
from slackwater.runtime.priority import UninterruptedSection
from slackwater.timeline.spans import PermitSpans

logger = logging.getLogger(__name__)

_LATENCIES = 10_000


@dataclass(frozen=True, slots=True)
class GrantTime:
    """How long a grant took from its event, and how much of that this thread computed."""

    wall_s: float
    own_s: float


class DecisionClock:
    """The time of the controller's last event, from which grants measure how long they took."""

    def __init__(self) -> None:
        self._event_s = self._event_own_s = 0.0
        self._undisturbed = UninterruptedSection()

    def __call__(self) -> UninterruptedSection:
        """Start the clock of the grants that follow from an event."""
        self._event_s, self._event_own_s = time.perf_counter(), time.thread_time()
        return self._undisturbed

    def measure(self) -> GrantTime:
        own_s = time.thread_time() - self._event_own_s
        return GrantTime(time.perf_counter() - self._event_s, own_s)


PermitCommand: TypeAlias = (
    commands.PermitGiven
    | commands.PermitEnded
    | commands.PermitShrunk
    | commands.StopJob
    | commands.RefuseJob
    | commands.StartJob
    | commands.HoldJob
    | commands.RentNodes
    | commands.ReturnNodes
)


class PermitExecutor:
    """Executes what the co-scheduler decides about jobs and their permits."""

    def __init__(
        self,
        driver: FleetDriver,
        spans: PermitSpans,
        clock: DecisionClock,
        *,
        end_refused_job: Callable[[JobId, str], None],
        save_state: Callable[[], None],
        prefetch: Callable[[list[JobId], list[JobId]], None] = lambda training, rolling: None,
    ) -> None:
        """`save_state` saves what must survive a crash; `prefetch` gets the jobs that train now,
        and those that train next.
        """
        self._feed, self._clock = driver.feed, clock
        self._end_refused_job, self._save_state = end_refused_job, save_state
        self._prefetch = prefetch
        self._changed: dict[JobId, asyncio.Event] = {}  # what waits for a job's next change
        self.spans = spans
        self._live: dict[int, tuple[JobId, Phase]] = {}
        self._clients: set[JobId] = set()  # jobs whose own code requests permits
        self._hinting = False
        self.grants = self.switches = self.tails = 0
        self.lost_permits: dict[JobId, tuple[int, str]] = {}
        self._grant_times: deque[GrantTime] = deque(maxlen=_LATENCIES)
        driver.register(self.execute, PermitCommand.__args__)

    def close(self) -> None:
        """Wake every waiter: the service stops."""
        for job in list(self._changed):
            self._wake(job)

    # ---- commands ----
    def execute(self, command: PermitCommand) -> None:
        match command:
            case commands.PermitGiven():
                self._record_grant(command)
            case commands.PermitEnded(job, permit, lost):
                self._record_end(job, permit, lost)
            case commands.PermitShrunk(job, permit):
                self.tails += 1
                self.spans.shrink(permit, loop_time())
                logger.info("rollout shrinks to its tail job=%s permit=%d", job, permit)
            case commands.StopJob(job, _, moves, reason):
                logger.warning("job stopped job=%s reason=%s", job, reason)
                if not moves:
                    self._feed(JobCrashed(loop_time(), job, reason))
            case commands.RefuseJob(job, reason):
                self._end_refused_job(job, reason)
                self._wake(job)
            case commands.StartJob(job) | commands.HoldJob(job):
                logger.info("job answered job=%s reason=%s", job, command.reason)
                self._save_state()
                self._wake(job)
            case commands.RentNodes() | commands.ReturnNodes():
                pass  # nothing to do without rented nodes

    def _record_grant(self, command: commands.PermitGiven) -> None:
        self.grants += 1
        self._live[command.permit] = (command.job, command.phase)
        if command.switch:
            self.switches += 1
            self._hint_soon()
        self.lost_permits.pop(command.job, None)
        took = self._clock.measure()
        self._grant_times.append(took)
        self.spans.begin(
            command.permit,
            command.job,
            command.phase,
            command.nodes,
            loop_time(),
            {
                "permit": command.permit,
                "granted_ms": round(1e3 * took.wall_s, 3),
                "granted_own_ms": round(1e3 * took.own_s, 3),
            },
        )
        if command.asked:
            self._clients.add(command.job)
            self._save_state()
        self._wake(command.job)

    def _record_end(self, job: JobId, permit: int, lost: str) -> None:
        self.spans.end(permit, loop_time())
        trained = self._live.pop(permit, None) == (job, Phase.TRAIN)
        if trained:
            self._hint_soon()
        if lost:
            self.lost_permits[job] = (permit, lost)
            logger.warning("permit lost job=%s permit=%d reason=%s", job, permit, lost)
        # A new control plane need not know that an inferred rollout ended.
        if trained or lost or job in self._clients:
            self._save_state()
        self._wake(job)

    def _hint_soon(self) -> None:
        """Prefetch soon, once for all grants of one event, which do not wait for it."""
        if not self._hinting:
            self._hinting = True
            asyncio.get_running_loop().call_soon(self._hint_now)

    def _hint_now(self) -> None:
        """Jobs that train need their states now; jobs that roll out train next."""
        self._hinting = False
        training = [job for job, phase in self._live.values() if phase is Phase.TRAIN]
        rolling = [job for job, phase in self._live.values() if phase is Phase.ROLLOUT]
        if training or rolling:
            self._prefetch(training, rolling)

    # ---- waiters ----
    async def wait(self, job: JobId, until_s: float) -> bool:
        """Wait until the job's permits change; False if they did not by `until_s`."""
        changed = self._changed.setdefault(job, asyncio.Event())
        return await wait_until_set(changed, max(until_s - loop_time(), 0.0))

    def _wake(self, job: JobId) -> None:
        if (changed := self._changed.pop(job, None)) is not None:
            changed.set()

    def grant_ms(self, share: float) -> float:
        """A quantile of the grants' times; 0 before the first."""
        return 1e3 * _quantile_s(share, [took.wall_s for took in self._grant_times])

    def grant_own_ms(self, share: float) -> float:
        """A quantile of this thread's computing time of grants."""
        return 1e3 * _quantile_s(share, [took.own_s for took in self._grant_times])


def _quantile_s(share: float, times_s: list[float]) -> float:
    ordered = sorted(times_s) or [0.0]
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
