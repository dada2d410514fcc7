"""The lender: one controller over all services' nodes and all jobs that want them.

    events -> lender.handle(event) -> commands

A node lends to one job at a time, after its service has used little of it for a whole window. It is
taken back at once when the service needs its memory or misses its SLO, when the service has needed
most of its time for a window, or when the job does not use it; and rests before it lends again. On
the node itself the arbiter decides (`policy/serving/arbiter.py`): prompts go first, so that a
second full of them is no reason to move the job's turns.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from slackwater.control.lending import commands, events
from slackwater.control.lending.demand import LoanDemand, LoanEvent
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, NodeId, ServiceName
from slackwater.policy.serving.lender_choice import LendableNode, LenderRule

REVIEW = "lender-review"
NO_LONGER_NEEDED = "the job needs it no more"


@dataclass(slots=True)
class _Node:
    """`lent_to` holds from LendNode to TakeBack, `leaving` from then until the node is clear.
    `used_s` is when its borrower last used it; `unused_loans` in a row were not used at all.
    """

    service: ServiceName
    reports: deque[tuple[float, float, float]] = field(default_factory=deque)
    lent_to: JobId | None = None
    leaving: JobId | None = None
    rests_until_s: float = 0.0
    keeps_promise: bool = True
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
        self._watching = False
        self._out: list[commands.LendingCommand] = []

    def handle(self, event: events.LendingEvent) -> Sequence[commands.LendingCommand]:
        """Take one event; return what the body must do, in order."""
        self._out = []
        now_s = event.now_s
        match event:
            case events.ServiceOpened(_, service, most_nodes):
                self._limits[service] = max(most_nodes, 0)
                self._shrink(service)
            case events.LendingStopped(_, service, reason):
                self._limits[service] = 0
                self._take_all(service, reason)
            case events.ServingNodeJoined(_, node, service):
                self._nodes.setdefault(node, _Node(service))
            case events.ServingNodeReported():
                self._reported(event)
            case events.ServingNodeLost(_, node):
                self._nodes.pop(node, None)
            case events.CapacityWanted(_, job, nodes, base_model):
                self._base_of[job] = base_model
                self._want(job, nodes)
            case events.BorrowerStepBegan(_, job):
                lent = [name for name, node in self._nodes.items() if node.lent_to == job]
                self._out += [commands.BeginStep(name, job) for name in lent]
            case events.CapacityReturned(_, job):
                self._want(job, 0)
                self._wanted.pop(job, None)
                self._base_of.pop(job, None)
            case events.NodeCleared() | events.LoanFailed():
                self._over(event)
            case TimerFired():
                self._watching = False
            case _:
                assert_never(event)
        self._lend(now_s)
        self._watch(now_s)
        return self._out

    # ---- questions the body may ask ----
    def lent(self) -> dict[NodeId, JobId]:
        """Who has which node."""
        return {
            name: node.lent_to for name, node in self._nodes.items() if node.lent_to is not None
        }

    def gauges(self) -> dict[str, float]:
        lent = self.lent()
        return {
            "serving_nodes": float(len(self._nodes)),
            "lent_nodes": float(len(lent)),
            "wanted_nodes": float(sum(self._wanted.values())),
        }

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for service, limit in self._limits.items():
            nodes = [node for node in self._nodes.values() if node.service == service]
            assert sum(node.lent_to is not None for node in nodes) <= limit
        for node in self._nodes.values():
            assert node.lent_to is None or node.leaving is None, "lent before it was clear"
            asked_for = node.lent_to is None or node.lent_to in self._wanted
            assert asked_for, f"lent to {node.lent_to}, which wants none"
        for job, wanted in self._wanted.items():
            assert self._held_by(job) <= wanted, "a job holds more than it wants"

    # ---- what happens ----
    def _reported(self, event: events.ServingNodeReported) -> None:
        node = self._nodes.get(event.node)
        if node is None:
            return
        node.reports.append((event.now_s, event.kv_share, event.busy_share))
        while node.reports[0][0] < event.now_s - self._settings.window_s:
            node.reports.popleft()
        node.keeps_promise = event.keeps_promise
        if node.lent_to is None:
            return
        now_s, rule = event.now_s, self._settings.rule
        if event.rollout_share >= rule.least_use:
            node.used_s, node.unused_loans = now_s, 0
        rest_s = rule.rest_s
        if not event.keeps_promise:
            why = "its service does not keep its SLO now, or would not beside rollouts"
        elif rule.must_return(event.kv_share, node.busy_share()):
            used = f"{event.kv_share:.0%} of the memory, {node.busy_share():.0%} of the time"
            why = f"its service uses {used}"
        elif now_s - node.used_s > rule.trial_s:
            why = f"its rollouts used less than {rule.least_use:.0%} of it for {rule.trial_s:g} s"
            rest_s = rule.rest_after(node.unused_loans)
            node.unused_loans += 1
        else:
            return
        node.rests_until_s = now_s + rest_s
        self._take(event.node, why)

    def _over(self, event: events.NodeCleared | events.LoanFailed) -> None:
        node = self._nodes.get(event.node)
        if node is None:
            return
        node.leaving = None
        if isinstance(event, events.LoanFailed):
            node.lent_to = None
            node.rests_until_s = event.now_s + self._settings.rule.rest_s

    def _want(self, job: JobId, nodes: int) -> None:
        self._wanted[job] = max(nodes, 0)
        surplus = self._held_by(job) - self._wanted[job]
        fullest = sorted(
            (name for name, node in self._nodes.items() if node.lent_to == job),
            key=lambda name: (-self._nodes[name].kv_share(), name),
        )
        for name in fullest[: max(surplus, 0)]:
            self._take(name, NO_LONGER_NEEDED)

    def _shrink(self, service: ServiceName) -> None:
        lending = [
            name
            for name, node in self._nodes.items()
            if node.service == service and node.lent_to is not None
        ]
        lending.sort(key=lambda name: (-self._nodes[name].kv_share(), name))
        for name in lending[: max(len(lending) - self._limits[service], 0)]:
            self._take(name, "the service lends fewer nodes")

    def _take_all(self, service: ServiceName, reason: str) -> None:
        for name, node in self._nodes.items():
            if node.service == service and node.lent_to is not None:
                self._take(name, reason)

    def _take(self, name: NodeId, reason: str) -> None:
        node = self._nodes[name]
        assert node.lent_to is not None
        node.leaving, node.lent_to = node.lent_to, None
        self._out.append(commands.TakeBack(name, node.leaving, reason))

    # ---- lending ----
    def _held_by(self, job: JobId) -> int:
        return sum(node.lent_to == job for node in self._nodes.values())

    def _lend(self, now_s: float) -> None:
        wanted = {job: count - self._held_by(job) for job, count in self._wanted.items()}
        if not any(count > 0 for count in wanted.values()):
            return
        idle = [
            LendableNode(name, node.service, node.kv_share(), node.busy_share())
            for name, node in self._nodes.items()
            if node.lent_to is None
            and node.leaving is None
            and node.reports
            and node.keeps_promise
            and now_s >= node.rests_until_s
        ]
        room = dict(self._limits)
        for node in self._nodes.values():
            if node.lent_to is not None:
                room[node.service] = room.get(node.service, 0) - 1
        for name, job in self._settings.rule.choose(idle, wanted, room):
            self._nodes[name].lent_to, self._nodes[name].used_s = job, now_s
            self._out.append(commands.LendNode(name, job, self._base_of[job]))

    def _watch(self, now_s: float) -> None:
        """Look again later while a job wants more than it has."""
        short = any(self._held_by(job) < count for job, count in self._wanted.items())
        if short and self._nodes and not self._watching:
            self._watching = True
            self._out.append(SetTimer(REVIEW, now_s + self._settings.review_every_s))


class LendingController:
    """Rollouts of the `lendable` base models borrow the nodes of services."""

    def __init__(self, lendable: Collection[str], settings: LenderSettings | None = None) -> None:
        self.lender = Lender(settings)
        self._demand = LoanDemand(lendable)

    def handle(self, event: LoanEvent) -> Sequence[commands.LendingCommand]:
        """Take one event; return what is to be done, in order."""
        out: list[commands.LendingCommand] = []
        for each in self._demand.translate(event):
            out += self.lender.handle(each)
        return out

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self.lender.check_integrity()
        self._demand.check_integrity()
