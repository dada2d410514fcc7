"""Permits, live: what the phase keeper says opens the gates of operations, answers whoever waits, and is drawn as a timeline."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slackwater.control.brain import BrainCommand, BrainEvent
from slackwater.control.coschedule import commands as do
from slackwater.control.coschedule import phase_commands as phase_do
from slackwater.control.jobs.events import JobCrashed
from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase
from slackwater.runtime.priority import Undisturbed
from slackwater.timeline.permit_spans import PermitSpans

logger = logging.getLogger(__name__)

_LATENCIES = 10_000


@dataclass(frozen=True, slots=True)
class GrantTime:
    """How long a permit took from the event that made it possible, and how much of that this thread computed: the rest it waited for a
    processor or for Python's lock."""

    wall_s: float
    own_s: float


@dataclass(frozen=True, slots=True)
class PhaseHands:
    """What the body works with: `gate_ops` reaches the trainers' line, `refused` ends what a job has running, `changed` is told when
    what must survive a crash of the control plane did, `prefetch` which jobs train now, and which roll out and train next: their states are
    needed on devices."""

    feed: Callable[[BrainEvent], None]
    gate_ops: Callable[[JobId, tuple[NodeId, ...] | None], None]
    refused: Callable[[JobId, str], None]
    changed: Callable[[], None]
    prefetch: Callable[[list[JobId], list[JobId]], None] = lambda training, rolling: None


class PhasesBody:
    """One per service with a co-scheduler."""

    def __init__(self, nodes: tuple[NodeId, ...], hands: PhaseHands) -> None:
        self._hands = hands
        self._waiters: dict[JobId, set[asyncio.Future[None]]] = {}
        self.spans = PermitSpans(nodes, _now_s())
        self._live: dict[int, tuple[JobId, Phase]] = {}
        self._asking: set[JobId] = set()  # those whose own code asks
        self._hinting = False
        self.given = self.switches = self.tails = 0
        self.lost: dict[JobId, tuple[int, str]] = {}
        self._grants: deque[GrantTime] = deque(maxlen=_LATENCIES)
        self._event_s = self._event_own_s = 0.0
        self._undisturbed = Undisturbed()

    def close(self) -> None:
        """Nobody waits any more."""
        for job in list(self._waiters):
            self._wake(job)

    # ---- commands ----
    def decision(self) -> Undisturbed:
        """An event came: the clock of the permits that follow from it."""
        self._event_s, self._event_own_s = time.perf_counter(), time.thread_time()
        return self._undisturbed

    def obey(self, command: BrainCommand) -> bool:
        """Carry a command out, if it is one of ours."""
        match command:
            case phase_do.GateOps(job, nodes):
                self._hands.gate_ops(job, nodes)
            case phase_do.PermitGiven():
                self._permit_given(command)
            case phase_do.PermitBack(job, permit, lost):
                self._permit_back(job, permit, lost)
            case phase_do.PermitShrunk(job, permit):
                self.tails += 1
                self.spans.shrunk(permit, _now_s())
                logger.info("rollout shrinks to its tail job=%s permit=%d", job, permit)
            case do.StopJob(job, _, moves, reason):
                logger.warning("job stopped job=%s reason=%s", job, reason)
                if not moves:
                    self._hands.feed(JobCrashed(_now_s(), job, reason))
            case do.RefuseJob(job, reason):
                self._hands.refused(job, reason)
                self._wake(job)
            case do.StartJob(job) | do.HoldJob(job):
                logger.info("job answered job=%s reason=%s", job, command.reason)
                self._hands.changed()
                self._wake(job)
            case do.GrantPermit() | do.ShrinkRollout() | do.RentNodes() | do.ReturnNodes():
                pass  # the keeper has said what follows from it
            case _:
                return False
        return True

    def _permit_given(self, command: phase_do.PermitGiven) -> None:
        self.given += 1
        self._live[command.permit] = (command.job, command.phase)
        if command.switch:
            self.switches += 1
            self._hint()
        self.lost.pop(command.job, None)
        own_s = time.thread_time() - self._event_own_s
        took = GrantTime(time.perf_counter() - self._event_s, own_s)
        self._grants.append(took)
        self.spans.given(
            *(command.permit, command.job, command.phase, command.nodes, _now_s()),
            {
                "permit": command.permit,
                "granted_ms": round(1e3 * took.wall_s, 3),
                "granted_own_ms": round(1e3 * took.own_s, 3),
            },
        )
        if command.asked:
            self._asking.add(command.job)
            self._hands.changed()
        self._wake(command.job)

    def _permit_back(self, job: JobId, permit: int, lost: str) -> None:
        self.spans.back(permit, _now_s())
        trained = self._live.pop(permit, None) == (job, Phase.TRAIN)
        if trained:
            self._hint()
        if lost:
            self.lost[job] = (permit, lost)
            logger.warning("permit lost job=%s permit=%d reason=%s", job, permit, lost)
        # The end of an inferred rollout is nothing that a new control plane must know.
        if trained or lost or job in self._asking:
            self._hands.changed()
        self._wake(job)

    def _hint(self) -> None:
        """Soon, once for all that follows from one event: permits do not wait for it."""
        if not self._hinting:
            self._hinting = True
            asyncio.get_running_loop().call_soon(self._hint_now)

    def _hint_now(self) -> None:
        """Who trains needs its state now; who rolls out trains next."""
        self._hinting = False
        training = [job for job, phase in self._live.values() if phase is Phase.TRAIN]
        rolling = [job for job, phase in self._live.values() if phase is Phase.ROLLOUT]
        if training or rolling:
            self._hands.prefetch(training, rolling)

    # ---- who waits ----
    async def wait(self, job: JobId, until_s: float) -> bool:
        """Until something happens to the job's permits; False if nothing did by then."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(job, set())
        waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter, max(until_s - _now_s(), 0.0))
        except TimeoutError:
            return False
        finally:
            waiters.discard(waiter)
            if not waiters:
                self._waiters.pop(job, None)
        return True

    def _wake(self, job: JobId) -> None:
        for waiter in self._waiters.get(job, ()):
            if not waiter.done():
                waiter.set_result(None)

    def grant_ms(self, share: float) -> float:
        """That share of permits took no longer; 0 before the first."""
        return 1e3 * _share_s(share, [took.wall_s for took in self._grants])

    def grant_own_ms(self, share: float) -> float:
        """That share of permits took this thread no more to compute."""
        return 1e3 * _share_s(share, [took.own_s for took in self._grants])


def _share_s(share: float, times_s: list[float]) -> float:
    ordered = sorted(times_s) or [0.0]
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
