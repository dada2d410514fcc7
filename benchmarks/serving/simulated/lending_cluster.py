"""A serving cluster with a lender of its own, whose devices may do different parts of a request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from slackwater.control.lending import events as on
from slackwater.control.lending.commands import LendingCommand
from slackwater.control.lending.lender import Lender, LenderSettings
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, NodeId
from slackwater.sim.rollout.simulated_instances import SimulatedInstances
from slackwater.sim.serving.cluster import ClusterPlan, ServingCluster
from slackwater.sim.serving.node import ServingNode
from slackwater.sim.serving.service_share import ServedRequest
from slackwater.sim.serving.serving_trace import Arrival

_TRANSFER_GB_PER_S = 40.0


class ServingRole(StrEnum):
    """Which part of a request a serving device does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class LendingPlan(ClusterPlan):
    """Without `roles` every device does whole requests."""

    roles: tuple[ServingRole, ...] = ()
    lender: LenderSettings = field(default_factory=LenderSettings)


class RoleNode(ServingNode):
    """One that is not `open` takes no requests."""

    role = ServingRole.MIXED
    open = True

    def hand_on(self, request: ServedRequest) -> None:
        """A prefilled request leaves for the device where it decodes."""
        self.service.kv_tokens -= request.prompt_tokens

    def take_in(self, request: ServedRequest, now_s: float) -> None:
        """A request that was prefilled elsewhere."""
        self.service.kv_tokens += request.prompt_tokens
        if not self.service.decode(request, now_s):
            self.on_done(request)
        self._check_memory(now_s)
        self.wake(now_s)


class LendingCluster(ServingCluster):
    plan: LendingPlan
    nodes: dict[NodeId, RoleNode]  # type: ignore[assignment]  # as `_node` makes them

    def __init__(
        self, plan: LendingPlan, body: SimulatedInstances, arrivals: Sequence[Arrival]
    ) -> None:
        super().__init__(plan, body, arrivals, Lender(plan.lender), self.hear)

    def _node(self, number: int) -> RoleNode:
        plan, seed = self.plan, self.plan.seed * 1000 + number
        name = NodeId(f"s{number}")
        node = RoleNode(name, plan.device, plan.slo, plan.mode, self.body.schedule, seed)
        node.role = plan.roles[number] if plan.roles else ServingRole.MIXED
        return node

    def want(self, job: JobId, nodes: int) -> None:
        """The job rolls out from now on."""
        if self.plan.mode.lends:
            self.hear(on.CapacityWanted(self.body.now_s, job, nodes))

    def release(self, job: JobId) -> None:
        """The job trains."""
        if self.plan.mode.lends:
            self.hear(on.CapacityReturned(self.body.now_s, job))

    def hear(self, event: on.LendingEvent) -> None:
        """What happens to the lender, and what follows."""
        for command in self.lender.handle(event):
            self._follow(command)

    def _follow(self, command: LendingCommand) -> None:
        if isinstance(command, SetTimer):
            self.body.schedule(command.at_s, partial(self._fire, command.name))
        else:
            self.execute(command)

    def _fire(self, name: str) -> None:
        self.hear(TimerFired(self.body.now_s, name))

    # ---- requests ----
    def _least_loaded_node(self) -> RoleNode:
        fit = [n for n in self.nodes.values() if n.role is not ServingRole.DECODE and n.open]
        return min(fit, key=lambda node: node.load)

    def _first_token(self, node: ServingNode, request: ServedRequest, now_s: float) -> None:
        assert isinstance(node, RoleNode)
        if node.role is ServingRole.MIXED:
            super()._first_token(node, request, now_s)
            return
        node.hand_on(request)
        if request.output_tokens <= 1:
            request.done_s = now_s
            self._record_answer(request)
            return
        decoders = [n for n in self.nodes.values() if n.role is ServingRole.DECODE and n.open]
        target = min(decoders, key=lambda one: one.service.kv_tokens)
        kv_gb = request.prompt_tokens * self.plan.device.serving.model.kv_bytes_per_token / 1e9
        arrives_s = now_s + kv_gb / _TRANSFER_GB_PER_S
        self.body.schedule(arrives_s, lambda: target.take_in(request, self.body.now_s))
