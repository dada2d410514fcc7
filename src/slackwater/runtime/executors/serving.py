"""Sends the lender's commands to serving workers, and feeds it their reports as events."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slackwater.control.lending import commands, events
from slackwater.control.lending.lender import NO_LONGER_NEEDED
from slackwater.model.ids import JobId, NodeId, ServiceName, WorkerId
from slackwater.runtime.live_driver import FleetDriver, loop_time
from slackwater.wire import lending, messages

logger = logging.getLogger(__name__)

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Offer:
    """The weights of a base model: its first version, and the model's URI."""

    base_version: str
    model: str


@dataclass(slots=True)
class _Minute:
    """Counters of one worker over the last minute, for rates."""

    seen: deque[tuple[float, float, float]] = field(default_factory=deque)

    def add(self, now_s: float, requests: float, met: float) -> None:
        if not self.seen:
            self.seen.append((now_s, 0.0, 0.0))  # the worker has just started
        self.seen.append((now_s, requests, met))
        while self.seen[0][0] < now_s - _MINUTE_S:
            self.seen.popleft()

    def requests_and_met(self) -> tuple[float, float]:
        first, last = self.seen[0], self.seen[-1]
        return last[1] - first[1], last[2] - first[2]


class ServingExecutor:
    """Serving workers, live. `offers` says by base model which weights a borrower needs;
    `is_slo_met(now_s)` whether users of the service are served within its SLO.
    """

    def __init__(
        self,
        driver: FleetDriver,
        send: Callable[[WorkerId, messages.Message], None],
        offers: Mapping[str, Offer],
        is_slo_met: Callable[[float], bool] = lambda now_s: True,
    ) -> None:
        self._is_slo_met = is_slo_met
        self._send, self._offers, self._feed = send, offers, driver.feed
        self._minutes: dict[WorkerId, _Minute] = {}
        self._used: dict[WorkerId, tuple[float, float, float]] = {}
        self._nodes: set[WorkerId] = set()
        self.borrowers: dict[WorkerId, JobId] = {}  # by the serving worker that lends
        self.loans = 0  # that began since the service started
        self.refusals: dict[WorkerId, str] = {}
        driver.register(
            self._execute, (commands.LendNode, commands.BeginStep, commands.ReclaimNode)
        )

    # ---- for the hub ----
    def add_worker(self, worker: WorkerId, facts: messages.EngineFacts) -> None:
        """A worker has joined; one that lends becomes a serving node."""
        if not facts.lends:
            return
        service = ServiceName(facts.base_model)
        self._nodes.add(worker)
        self._feed(events.ServingNodeJoined(loop_time(), NodeId(worker), service))

    def remove_worker(self, worker: WorkerId) -> None:
        self._minutes.pop(worker, None)
        self._used.pop(worker, None)
        self.borrowers.pop(worker, None)
        if worker in self._nodes:
            self._nodes.discard(worker)
            self._feed(events.ServingNodeLost(loop_time(), NodeId(worker)))

    def end_loan(self, worker: WorkerId, error: str) -> None:
        """A loan has ended, or could not begin: `error` says why."""
        self.borrowers.pop(worker, None)
        node, now_s = NodeId(worker), loop_time()
        if not error:
            self._feed(events.NodeCleared(now_s, node))
            return
        self.refusals[worker] = error
        logger.warning("lending: worker=%s %s", worker, error)
        self._feed(events.LoanFailed(now_s, node, error))

    def record_heartbeat(self, worker: WorkerId, gauges: Mapping[str, float]) -> None:
        now_s = loop_time()
        if "slo_requests" in gauges:
            minute = self._minutes.setdefault(worker, _Minute())
            minute.add(now_s, gauges["slo_requests"], gauges["slo_met"])
        if worker not in self._nodes:
            return
        needed_s, rolled_s = gauges["needed_s"], gauges["rollout_s"]
        before_s, needed_before_s, rolled_before_s = self._used.get(
            worker, (now_s, needed_s, rolled_s)
        )
        self._used[worker] = (now_s, needed_s, rolled_s)
        passed_s = max(now_s - before_s, 0.1)
        busy, rollout = (
            min(max(spent_s / passed_s, 0.0), 1.0)
            for spent_s in (needed_s - needed_before_s, rolled_s - rolled_before_s)
        )
        rollout = rollout if gauges["lent"] else 1.0  # its weights may be on their way
        meets_slo = bool(gauges["promise_kept"]) and self._is_slo_met(now_s)
        kv_share, node = gauges["kv_share"], NodeId(worker)
        self._feed(events.ServingNodeReported(now_s, node, kv_share, busy, meets_slo, rollout))

    # ---- for the control plane ----
    def gauges(self) -> dict[str, float]:
        """What is lent, and the last minute's attainment as serving workers measured it."""
        if not self._minutes:
            return {}
        counts = [minute.requests_and_met() for minute in self._minutes.values()]
        requests, met = (sum(column) for column in zip(*counts, strict=True))
        return {
            "serving_worker_requests_last_minute": requests,
            "serving_worker_slo_attainment_last_minute": met / requests if requests else 1.0,
            "lent_devices": float(len(self.borrowers)),
            "borrowing_jobs": float(len(set(self.borrowers.values()))),
            "loans": float(self.loans),
        }

    # ---- commands ----
    def _execute(self, command: commands.LendingCommand) -> None:
        match command:
            case commands.LendNode(node, job, base):
                self.borrowers[WorkerId(node)] = job
                self.loans += 1
                self.refusals.pop(WorkerId(node), None)
                offer = self._offers[base]
                loan = lending.LendNode(job, base, offer.base_version, offer.model)
                self._send(WorkerId(node), loan)
            case commands.BeginStep(node):
                self._send(WorkerId(node), lending.BeginStep())
            case commands.ReclaimNode(node, _, reason):
                if reason != NO_LONGER_NEEDED:
                    self.refusals[WorkerId(node)] = reason
                self._send(WorkerId(node), lending.ReclaimNode(reason))
