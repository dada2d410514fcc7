"""A serving cluster that lends nodes to a rollout job: it routes requests and takes nodes back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from slackwater.control.lending import commands, events
from slackwater.control.lending.lender import Lender
from slackwater.model.ids import InstanceId, JobId, NodeId, ServiceName
from slackwater.model.instance import InstanceKind
from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.modes import LendingMode
from slackwater.sim.fleet.serving import ServingCommand
from slackwater.sim.rollout.engine_cost import SharedDevice
from slackwater.sim.rollout.simulated_engine import Request
from slackwater.sim.rollout.simulated_instances import SimulatedInstances
from slackwater.sim.serving.node import ServingNode
from slackwater.sim.serving.rollout_share import RolloutShare
from slackwater.sim.serving.service_share import ServedRequest
from slackwater.sim.serving.serving_trace import Arrival

SERVICE = ServiceName("service")
_REPORT_S = 1.0
_FULL = "the service needs the memory"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """`nodes` devices, their SLO and mode; a borrower comes with version `holds` of its weights."""

    device: SharedDevice
    slo: ServingSlo
    nodes: int
    mode: LendingMode
    turns_per_node: int = 16
    seed: int = 0
    holds: str | None = "v0"


class ServingCluster:
    """On the rollout's event queue. `tell` takes the lender's events, `execute` its commands."""

    def __init__(
        self,
        plan: ClusterPlan,
        body: SimulatedInstances,
        arrivals: Sequence[Arrival],
        lender: Lender,
        tell: Callable[[events.LendingEvent], None],
    ) -> None:
        self.plan, self.body, self.lender, self._tell = plan, body, lender, tell
        self.requests: list[ServedRequest] = []
        self.closed = False  # no request comes any more
        self._answered = 0
        self._borrowed: dict[NodeId, InstanceId] = {}
        self.loans = 0
        self._arrivals = arrivals
        self.nodes = {node.name: node for node in map(self._node, range(plan.nodes))}
        for node in self.nodes.values():
            node.on_first = partial(self._first_token, node)
            node.on_done = self._record_answer
            node.on_turns_ended = partial(self._turns_ended, node.name)
            node.on_given_back = partial(self._return_requests, node.name)

    def _node(self, number: int) -> ServingNode:
        plan, seed = self.plan, self.plan.seed * 1000 + number
        name = NodeId(f"s{number}")
        return ServingNode(name, plan.device, plan.slo, plan.mode, self.body.schedule, seed)

    def start(self, period_s: float = 600.0) -> None:
        """Start the arrivals, which repeat the trace, and the nodes' reports to the lender."""
        for name in self.nodes:
            self._tell(events.ServingNodeJoined(self.body.now_s, name, SERVICE))
        self._tell(events.ServiceOpened(self.body.now_s, SERVICE, self.plan.nodes))
        self._report()
        self._schedule_arrival(0, 0.0, period_s)

    @property
    def unanswered(self) -> int:
        """How many requests are not done."""
        return len(self.requests) - self._answered

    def attainment(self, until_s: float) -> float:
        """The share of the requests that came until then that were answered within the SLO."""
        slo = self.plan.slo
        met = [slo.is_met(r.ttft_s, r.tpot_s) for r in self.requests if r.arrival_s <= until_s]
        return sum(met) / len(met) if met else 1.0

    # ---- requests ----
    def _record_answer(self, request: ServedRequest) -> None:
        self._answered += 1

    def _schedule_arrival(self, place: int, base_s: float, period_s: float) -> None:
        if not self._arrivals:
            return
        arrival = self._arrivals[place]

        def arrive() -> None:
            if self.closed:
                return
            request = ServedRequest(
                len(self.requests),
                self.body.now_s,
                arrival.prompt_tokens,
                arrival.output_tokens,
                arrival.cached_tokens,
            )
            self.requests.append(request)
            self._least_loaded_node().arrive(request, self.body.now_s)
            wraps = place + 1 == len(self._arrivals)
            next_base_s = base_s + period_s if wraps else base_s
            self._schedule_arrival(0 if wraps else place + 1, next_base_s, period_s)

        self.body.schedule(base_s + arrival.at_s, arrive)

    def _least_loaded_node(self) -> ServingNode:
        return min(self.nodes.values(), key=lambda node: node.load)

    def _first_token(self, node: ServingNode, request: ServedRequest, now_s: float) -> None:
        if not node.service.decode(request, now_s):
            self._record_answer(request)

    # ---- lending ----
    def _report(self) -> None:
        for name, node in self.nodes.items():
            self._tell(
                events.ServingNodeReported(
                    self.body.now_s,
                    name,
                    min(node.kv_share(), 1.0),
                    node.busy_share(_REPORT_S),
                    node.arbiter.keeps_slo(self.body.now_s),
                    node.rollout_share(_REPORT_S),
                )
            )
        self.body.schedule(self.body.now_s + _REPORT_S, self._report)

    def execute(self, command: ServingCommand) -> None:
        """Execute a command of the lender."""
        match command:
            case commands.LendNode(node, job):
                if not self.nodes[node].make_room():
                    failed = partial(self._tell, events.LoanFailed(self.body.now_s, node, _FULL))
                    self.body.schedule(self.body.now_s, failed)
                    return
                self.body.schedule(
                    self.body.now_s + self.plan.device.activation_s,
                    partial(self._activate, node, job),
                )
            case commands.ReclaimNode(node):
                self._take_back(node)
            case commands.BeginStep(node):
                self._begin_step(node)

    def _borrower_of(self, name: NodeId) -> JobId | None:
        return self.lender.loans().get(name)

    def _activate(self, name: NodeId, job: JobId) -> None:
        if self._borrower_of(name) != job or name in self._borrowed:
            return  # taken back while its weights were on the way
        node, now_s = self.nodes[name], self.body.now_s
        cost = self.plan.device.rollout
        turns = self.plan.turns_per_node
        rollout = RolloutShare(cost, turns, now_s, 0, self.plan.mode.lease_s)
        node.lend(rollout, now_s)
        if rollout.kv_tokens <= 0:
            node.take_back()
            self._tell(events.LoanFailed(now_s, name, _FULL))
            return
        rollout.on_work = lambda: node.wake(self.body.now_s)
        self.loans += 1
        instance = self._borrowed[name] = InstanceId(f"{name}#{self.loans}")
        kind, kv_tokens = InstanceKind.BORROWED, rollout.kv_tokens
        spec = self.body.spec(instance, kind, cost, max_running=turns, job=job, kv_tokens=kv_tokens)
        self.body.join(spec, cost, holds=self.plan.holds, engine=rollout)

    def _begin_step(self, name: NodeId) -> None:
        if name in self._borrowed:
            given, kv_tokens = self.nodes[name].begin_step(self.body.now_s)
            self.body.give_back(self._borrowed[name], given, kv_tokens, "its budget is smaller now")

    def _take_back(self, name: NodeId) -> None:
        instance = self._borrowed.pop(name, None)
        self.nodes[name].take_back()
        if instance is not None:
            self.body.lose(instance, "the service took the node back")
        self._tell(events.NodeCleared(self.body.now_s, name))

    def _turns_ended(self, name: NodeId) -> None:
        if name in self._borrowed:
            self.body.turns_ended(self._borrowed[name])

    def _return_requests(self, name: NodeId, requests: list[Request], kv_tokens: int) -> None:
        if name in self._borrowed:
            self.body.give_back(self._borrowed[name], requests, kv_tokens, _FULL)
