"""Lending, live: what serving workers say becomes the lender's events, its commands become messages to them."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from slackwater.control.controller import Controller
from slackwater.control.lending import commands as do
from slackwater.control.lending import events as on
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, NodeId, ServiceName, WorkerId
from slackwater.runtime.bodies.timers import Timers
from slackwater.wire import lending, messages

logger = logging.getLogger(__name__)

_QUIET_S = 2.0  # a job without a live turn for so long has ended its rollout
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Offer:
    """The weights of a base model: its first version, and the model's URI."""

    base_version: str
    model: str


@dataclass(slots=True)
class _Minute:
    """Counters of one worker a minute back, to make rates of."""

    seen: deque[tuple[float, float, float]] = field(default_factory=deque)

    def add(self, now_s: float, requests: float, met: float) -> None:
        if not self.seen:
            self.seen.append((now_s, 0.0, 0.0))  # its worker has just come up
        self.seen.append((now_s, requests, met))
        while self.seen[0][0] < now_s - _MINUTE_S:
            self.seen.popleft()

    def requests_and_met(self) -> tuple[float, float]:
        first, last = self.seen[0], self.seen[-1]
        return last[1] - first[1], last[2] - first[2]


class LendingBody:
    """One lender; serving workers are its nodes. `offers` says by base model which weights a borrower needs.

    A job borrows from its first live turn on until it trains, or has had none for a while. Turns that come after its
    optimizer has stepped are its next RL step's.
    """

    def __init__(
        self,
        send: Callable[[WorkerId, messages.Message], None],
        lender: Controller[on.LendingEvent, do.LendingCommand],
        offers: Mapping[str, Offer],
        live_jobs: Callable[[], Set[JobId]],
    ) -> None:
        self._send, self._lender, self._offers, self._live = send, lender, offers, live_jobs
        self._timers = Timers(lambda name: self._feed(TimerFired(_now_s(), name)))
        self._minutes: dict[WorkerId, _Minute] = {}
        self._needed_s: dict[WorkerId, tuple[float, float]] = {}
        self._nodes: set[WorkerId] = set()
        self._active_s: dict[JobId, float] = {}
        self._base_of: dict[JobId, str] = {}
        self._stepped: set[JobId] = set()
        self._lent: dict[WorkerId, JobId] = {}
        self.refusals: dict[WorkerId, str] = {}

    # ---- what workers say ----
    def joined(self, worker: WorkerId, facts: messages.EngineFacts) -> None:
        """A worker came up; one that lends is a node of its service."""
        if not facts.lends:
            return
        service = ServiceName(facts.base_model)
        self._nodes.add(worker)
        self._feed(on.ServingNodeJoined(_now_s(), NodeId(worker), service))
        self._feed(on.ServiceOpened(_now_s(), service, len(self._nodes)))
        for job in list(self._active_s):
            self._feed(on.CapacityWanted(_now_s(), job, len(self._nodes)))

    def lost(self, worker: WorkerId) -> None:
        self._minutes.pop(worker, None)
        self._needed_s.pop(worker, None)
        self._lent.pop(worker, None)
        if worker in self._nodes:
            self._nodes.discard(worker)
            self._feed(on.ServingNodeLost(_now_s(), NodeId(worker)))

    def over(self, worker: WorkerId, error: str) -> None:
        """A loan has ended, or could not begin."""
        self._lent.pop(worker, None)
        node, now_s = NodeId(worker), _now_s()
        if not error:
            self._feed(on.NodeCleared(now_s, node))
            return
        self.refusals[worker] = error
        logger.warning("lending: worker=%s %s", worker, error)
        self._feed(on.LoanFailed(now_s, node, error))

    def heartbeat(self, worker: WorkerId, gauges: Mapping[str, float]) -> None:
        """A serving worker's report."""
        now_s = _now_s()
        if "slo_requests" in gauges:
            minute = self._minutes.setdefault(worker, _Minute())
            minute.add(now_s, gauges["slo_requests"], gauges["slo_met"])
        if worker not in self._nodes:
            return
        self._look_at_jobs(now_s)
        before_s, before = self._needed_s.get(worker, (now_s, gauges["needed_s"]))
        self._needed_s[worker] = (now_s, gauges["needed_s"])
        spent = (gauges["needed_s"] - before) / max(now_s - before_s, 0.1)
        busy = min(max(spent, 0.0), 1.0)
        kept = bool(gauges["promise_kept"])
        self._feed(on.ServingNodeReported(now_s, NodeId(worker), gauges["kv_share"], busy, kept))

    # ---- for the plane ----
    def is_loan(self, worker: WorkerId) -> bool:
        """Whether a name is that of a borrowed instance on a serving worker."""
        return "~" in worker

    def gauges(self) -> dict[str, float]:
        """Attainment of the last minute as serving workers saw it, from a request's arrival there; and what is lent."""
        if not self._minutes:
            return {}
        counts = [minute.requests_and_met() for minute in self._minutes.values()]
        requests, met = (sum(column) for column in zip(*counts, strict=True))
        return {
            "serving_worker_requests_last_minute": requests,
            "serving_worker_slo_attainment_last_minute": met / requests if requests else 1.0,
            "lent_devices": float(len(self._lent)),
            "borrowing_jobs": float(len(set(self._lent.values()))),
        }

    def lent(self) -> dict[WorkerId, JobId]:
        """Which job has which serving worker's device."""
        return dict(self._lent)

    def close(self) -> None:
        self._timers.cancel_all()

    # ---- what jobs do ----
    def rolls_out(self, job: JobId, base_model: str) -> None:
        """A job has one more live turn."""
        if base_model not in self._offers:
            return
        now_s = _now_s()
        known, self._base_of[job] = job in self._active_s, base_model
        self._active_s[job] = now_s
        if not known:
            self._feed(on.CapacityWanted(now_s, job, max(len(self._nodes), 1)))
        elif job in self._stepped:
            self._feed(on.StepBegan(now_s, job))
        self._stepped.discard(job)

    def trains(self, job: JobId) -> None:
        """A job has the trainers' devices: unless it rolls out meanwhile, its weights need be nowhere else."""
        if job in self._active_s and job not in self._live():
            self._return(job)

    def stepped(self, job: JobId) -> None:
        """A job's optimizer has stepped."""
        if job in self._active_s:
            self._stepped.add(job)

    def _look_at_jobs(self, now_s: float) -> None:
        """A job without a live turn for a while does not roll out any more."""
        live = self._live()
        for job, active_s in list(self._active_s.items()):
            if job in live:
                self._active_s[job] = now_s
            elif now_s - active_s > _QUIET_S:
                self._return(job)

    def _return(self, job: JobId) -> None:
        del self._active_s[job], self._base_of[job]
        self._stepped.discard(job)
        self._feed(on.CapacityReturned(_now_s(), job))

    # ---- commands ----

    def _feed(self, event: on.LendingEvent) -> None:
        for command in self._lender.handle(event):
            match command:
                case do.LendNode(node, job):
                    self._lent[WorkerId(node)] = job
                    self.refusals.pop(WorkerId(node), None)
                    base = self._base_of[job]
                    offer = self._offers[base]
                    told = lending.LendTo(job, base, offer.base_version, offer.model)
                    self._send(WorkerId(node), told)
                case do.BeginStep(node):
                    self._send(WorkerId(node), lending.StepBegan())
                case do.TakeBack(node, job, reason):
                    if job in self._active_s:  # it would have gone on
                        self.refusals[WorkerId(node)] = reason
                    self._send(WorkerId(node), lending.TakeBack(reason))
                case SetTimer(name, at_s):
                    self._timers.set(name, at_s)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
