"""The lender: one controller over all services' nodes and all jobs that want them.

    events -> lender.handle(event) -> commands

A node lends to one job at a time, after its service has used little of it for a whole window. It is
reclaimed when the service needs its memory, misses its SLO or has needed most of its time for a
window, or when the job does not use it; it rests before it lends again. Within the node the arbiter
(`policy/serving/arbiter.py`) runs the service's prompts first, so that a short burst of them is no
reason to move the job's turns.
"""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from slackwater.control.lending import commands, events
from slackwater.control.lending.demand import LoanDemand, LoanEvent
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, NodeId, ServiceName
from slackwater.policy.serving.lender_choice import LendableNode, LenderRule

REVIEW = "lender-review"
NO_LONGER_NEEDED = "the job no longer needs it"


@dataclass(slots=True)
class _Node:
    """`lent_to` holds from LendNode to ReclaimNode, `leaving` from then until the node is clear.
    `used_s` is when its borrower last used it; `unused_loans` in a row were not used at all.
    """

    service: ServiceName
    reports: deque[tuple[float, float, float]] = field(default_factory=deque)
    lent_to: JobId | None = None
    leaving: JobId | None = None
    rests_until_s: float = 0.0
    meets_slo: bool = True
    used_s: float = 0.0
    unused_loans: int = 0

    def kv_share(self) -> float:
        return max((kv for _, kv, _ in self.reports), default=0.0)

    def busy_share(self) -> float:
        return sum(busy for _, _, busy in self.reports) / max(len(self.reports), 1)


@dataclass(frozen=True, slots=True)
class LenderSettings:
    """Reports count for `window_s`; idle nodes are reviewed every `review_every_s`."""

    rule: LenderRule = field(default_factory=LenderRule)
    window_s: float = 60.0
    review_every_s: float = 5.0


class Lender:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self, settings: LenderSettings | None = None) -> None:
        self._settings = settings or LenderSettings()
        self._limits: dict[ServiceName, int] = {}
        self._nodes: dict[NodeId, _Node] = {}
        self._wanted: dict[JobId, int] = {}
        self._base_of: dict[JobId, str] = {}
        self._review_scheduled = False
        self._out: list[commands.LendingCommand] = []

    def handle(self, event: events.LendingEvent) -> Sequence[commands.LendingCommand]:
        self._out = []
        now_s = event.now_s
        match event:
            case events.ServiceOpened(_, service, most_nodes):
                most = self._limits[service] = max(most_nodes, 0)
                why = "the service lends fewer nodes"
                self._reclaim_surplus(self._list_lent_by(service), most, why)
            case events.LendingStopped(_, service, reason):
                self._limits[service] = 0
                for name in self._list_lent_by(service):
                    self._reclaim(name, reason)
            case events.ServingNodeJoined(_, node, service):
                self._nodes.setdefault(node, _Node(service))
            case events.ServingNodeReported():
                self._record_report(event)
            case events.ServingNodeLost(_, node):
                self._nodes.pop(node, None)
            case events.CapacityWanted(_, job, nodes, base_model):
                self._base_of[job] = base_model
                self._set_demand(job, nodes)
            case events.BorrowerStepBegan(_, job):
                self._out += [commands.BeginStep(name, job) for name in self._list_lent_to(job)]
            case events.CapacityReturned(_, job):
                self._set_demand(job, 0)
                self._wanted.pop(job, None)
                self._base_of.pop(job, None)
            case events.NodeCleared() | events.LoanFailed():
                self._end_loan(event)
            case TimerFired():
                self._review_scheduled = False
            case _:
                assert_never(event)
        self._lend(now_s)
        self._schedule_review(now_s)
        return self._out

    # ---- queries ----
    def loans(self) -> dict[NodeId, JobId]:
        """Borrowing jobs by node."""
        return {
            name: node.lent_to for name, node in self._nodes.items() if node.lent_to is not None
        }

    def gauges(self) -> dict[str, float]:
        return {
            "serving_nodes": float(len(self._nodes)),
            "lent_nodes": float(len(self.loans())),
            "wanted_nodes": float(sum(self._wanted.values())),
        }

    def check_integrity(self) -> None:
        for service, limit in self._limits.items():
            nodes = [node for node in self._nodes.values() if node.service == service]
            assert sum(node.lent_to is not None for node in nodes) <= limit
        for node in self._nodes.values():
            assert node.lent_to is None or node.leaving is None, "lent before it was clear"
            borrows = node.lent_to is None or node.lent_to in self._wanted
            assert borrows, f"lent to {node.lent_to}, which wants none"
        assert min(self._missing().values(), default=0) >= 0, "a job holds more than it wants"

    # ---- reports and demand ----
    def _record_report(self, event: events.ServingNodeReported) -> None:
        node = self._nodes.get(event.node)
        if node is None:
            return
        node.reports.append((event.now_s, event.kv_share, event.busy_share))
        while node.reports[0][0] < event.now_s - self._settings.window_s:
            node.reports.popleft()
        node.meets_slo = event.meets_slo
        if node.lent_to is None:
            return
        now_s, rule = event.now_s, self._settings.rule
        if event.rollout_share >= rule.least_use:
            node.used_s, node.unused_loans = now_s, 0
        rest_s = rule.rest_s
        if not event.meets_slo:
            why = "its service misses its SLO, or would with rollouts beside it"
        elif rule.must_return(event.kv_share, node.busy_share()):
            used = f"{event.kv_share:.0%} of the memory, {node.busy_share():.0%} of the time"
            why = f"its service uses {used}"
        elif now_s - node.used_s > rule.trial_s:
            why = f"its rollouts used less than {rule.least_use:.0%} of it for {rule.trial_s:g} s"
            rest_s = rule.rest_duration_s(node.unused_loans)
            node.unused_loans += 1
        else:
            return
        node.rests_until_s = now_s + rest_s
        self._reclaim(event.node, why)

    def _end_loan(self, event: events.NodeCleared | events.LoanFailed) -> None:
        node = self._nodes.get(event.node)
        if node is None:
            return
        node.leaving = None
        if isinstance(event, events.LoanFailed):
            node.lent_to = None
            node.rests_until_s = event.now_s + self._settings.rule.rest_s

    def _set_demand(self, job: JobId, nodes: int) -> None:
        self._wanted[job] = max(nodes, 0)
        self._reclaim_surplus(self._list_lent_to(job), self._wanted[job], NO_LONGER_NEEDED)

    def _list_lent_by(self, service: ServiceName) -> list[NodeId]:
        return [name for name in self.loans() if self._nodes[name].service == service]

    def _list_lent_to(self, job: JobId) -> list[NodeId]:
        return [name for name, borrower in self.loans().items() if borrower == job]

    def _reclaim_surplus(self, lent: list[NodeId], most: int, reason: str) -> None:
        """Reclaim the fullest of these nodes, until `most` are lent."""
        lent.sort(key=lambda name: (-self._nodes[name].kv_share(), name))
        for name in lent[: max(len(lent) - most, 0)]:
            self._reclaim(name, reason)

    def _reclaim(self, name: NodeId, reason: str) -> None:
        node = self._nodes[name]
        assert node.lent_to is not None
        node.leaving, node.lent_to = node.lent_to, None
        self._out.append(commands.ReclaimNode(name, node.leaving, reason))

    # ---- lending ----
    def _missing(self) -> dict[JobId, int]:
        """How many more nodes each job wants than it has."""
        held = Counter(self.loans().values())
        return {job: count - held[job] for job, count in self._wanted.items()}

    def _lend(self, now_s: float) -> None:
        wanted = self._missing()
        if not any(count > 0 for count in wanted.values()):
            return
        idle = [
            LendableNode(name, node.service, node.kv_share(), node.busy_share())
            for name, node in self._nodes.items()
            if node.lent_to is None
            and node.leaving is None
            and node.reports
            and node.meets_slo
            and now_s >= node.rests_until_s
        ]
        room = dict(self._limits)
        for node in self._nodes.values():
            if node.lent_to is not None:
                room[node.service] = room.get(node.service, 0) - 1
        for name, job in self._settings.rule.choose(idle, wanted, room):
            self._nodes[name].lent_to, self._nodes[name].used_s = job, now_s
            self._out.append(commands.LendNode(name, job, self._base_of[job]))

    def _schedule_review(self, now_s: float) -> None:
        """Review idle nodes later while a job wants more than it has."""
        if self._review_scheduled or not self._nodes:
            return
        if any(count > 0 for count in self._missing().values()):
            self._review_scheduled = True
            self._out.append(SetTimer(REVIEW, now_s + self._settings.review_every_s))


class LendingController:
    """The fleet's lending: `LoanDemand` and `Lender` as one component."""

    def __init__(self, lendable: Collection[str], settings: LenderSettings | None = None) -> None:
        self.lender = Lender(settings)
        self._demand = LoanDemand(lendable)

    def handle(self, event: LoanEvent) -> Sequence[commands.LendingCommand]:
        out: list[commands.LendingCommand] = []
        for each in self._demand.translate(event):
            out += self.lender.handle(each)
        return out

    def check_integrity(self) -> None:
        self.lender.check_integrity()
        self._demand.check_integrity()
