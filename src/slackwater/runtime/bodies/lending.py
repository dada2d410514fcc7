"""Lending, live: what serving workers say becomes the lender's events, its commands become messages to them."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slackwater.control.controller import Controller
from slackwater.control.lending import commands as do
from slackwater.control.lending import events as on
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, NodeId, ServiceName, WorkerId
from slackwater.runtime.bodies.timers import Timers
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import lending, messages

logger = logging.getLogger(__name__)

_QUIET_S = 2.0  # a job without a live turn for so long has ended its rollout
_MINUTE_S = 60.0


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
    """One lender; serving workers are its nodes. `offers` says how a rollout's base model is brought up.

    To the lender a borrower is a base model with live turns, whosever jobs they are: that is what is brought onto a device.
    """

    def __init__(
        self,
        hub: WorkerHub,
        lender: Controller[on.LendingEvent, do.LendingCommand],
        offers: Mapping[JobId, lending.LendTo],
        live_turns: Callable[[str], int],
    ) -> None:
        self._hub, self._lender, self._offers, self._live = hub, lender, offers, live_turns
        self._timers = Timers(lambda name: self._feed(TimerFired(_now_s(), name)))
        self._minutes: dict[WorkerId, _Minute] = {}
        self._needed_s: dict[WorkerId, tuple[float, float]] = {}
        self._nodes: set[WorkerId] = set()
        self._active_s: dict[JobId, float] = {}
        self._wanted: set[JobId] = set()
        self._lent: set[WorkerId] = set()
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

    def lost(self, worker: WorkerId) -> None:
        self._minutes.pop(worker, None)
        self._needed_s.pop(worker, None)
        self._lent.discard(worker)
        if worker in self._nodes:
            self._nodes.discard(worker)
            self._feed(on.ServingNodeLost(_now_s(), NodeId(worker)))

    def over(self, worker: WorkerId, error: str) -> None:
        """A loan has ended, or could not begin."""
        self._lent.discard(worker)
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
        self._feed(on.ServingNodeReported(now_s, NodeId(worker), gauges["kv_share"], busy))

    # ---- for the plane ----
    def is_loan(self, worker: WorkerId) -> bool:
        """Whether a name is that of a borrowed instance on a serving worker."""
        return "~" in worker

    def gauges(self) -> dict[str, float]:
        """Attainment of the last minute over all serving workers, and what is lent."""
        if not self._minutes:
            return {}
        counts = [minute.requests_and_met() for minute in self._minutes.values()]
        requests, met = (sum(column) for column in zip(*counts, strict=True))
        return {
            "serving_requests_last_minute": requests,
            "serving_slo_attainment_last_minute": met / requests if requests else 1.0,
            "lent_devices": float(len(self._lent)),
        }

    def close(self) -> None:
        self._timers.cancel_all()

    # ---- jobs and commands ----
    def _look_at_jobs(self, now_s: float) -> None:
        """A job with live turns rolls out; one that has had none for a while does not."""
        for job in self._offers:
            if self._live(job):
                self._active_s[job] = now_s
            active = now_s - self._active_s.get(job, -_QUIET_S) < _QUIET_S
            if active and job not in self._wanted:
                self._wanted.add(job)
                self._feed(on.CapacityWanted(now_s, job, len(self._nodes)))
            elif not active and job in self._wanted:
                self._wanted.discard(job)
                self._feed(on.CapacityReturned(now_s, job))

    def _feed(self, event: on.LendingEvent) -> None:
        for command in self._lender.handle(event):
            match command:
                case do.LendNode(node, job):
                    self._lent.add(WorkerId(node))
                    self._hub.send(WorkerId(node), self._offers[job])
                case do.TakeBack(node, _, reason):
                    self._hub.send(WorkerId(node), lending.TakeBack(reason))
                case SetTimer(name, at_s):
                    self._timers.set(name, at_s)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
