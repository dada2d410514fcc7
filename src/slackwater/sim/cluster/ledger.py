"""Accounts of a simulated run: what nodes cost and did, and how each job fared."""

from dataclasses import dataclass, field
from functools import cache

from slackwater.model.ids import GroupId, JobId, NodeId
from slackwater.model.job import ITERATIONS_PER_MOVE, JobSpec
from slackwater.model.node import NodeType, Role
from slackwater.model.placement import Phase, Strategy, place_devices
from slackwater.sim.cluster.report import JobRow, PoolUse
from slackwater.timeline.spans import CostStep, Rental, Span

# Sums of many floating point times; far below any phase.
_TOLERANCE = 1e-9


@dataclass(slots=True)
class SimulatedAccount:
    """One job's run so far. Its clock runs from its first permit and stands still while it is
    away.
    """

    spec: JobSpec
    placed_s: float | None = None
    first_permit_s: float | None = None
    clock_s: float | None = None
    spent_s: float = 0.0
    iteration_began_s: float = 0.0  # on its clock
    iterations_done: int = 0
    iterations_in_bound: int = 0
    solo_realised_s: float = 0.0
    finished_s: float | None = None
    strategy: Strategy | None = None
    group: GroupId | None = None
    moves: int = 0
    shortest_stay_s: float | None = None
    crashes: int = 0
    reason: str = ""
    _settled_s: float | None = None

    def job_time_s(self, now_s: float) -> float:
        """What its clock shows."""
        return self.spent_s + (now_s - self.clock_s if self.clock_s is not None else 0.0)

    def settle(self, group: GroupId, now_s: float) -> bool:
        """Record a placement; return whether the job moved there while it ran."""
        moved = self.group is not None and self.clock_s is not None
        self.moves += moved
        if self._settled_s is not None:
            stayed_s = now_s - self._settled_s
            if self.shortest_stay_s is None or stayed_s < self.shortest_stay_s:
                self.shortest_stay_s = stayed_s
        self.group, self._settled_s = group, now_s
        return moved

    def start_phase(self, now_s: float) -> None:
        """A phase begins."""
        if self.clock_s is None:
            self.clock_s = now_s
            if self.first_permit_s is None:
                self.first_permit_s = now_s

    def end_iteration(self, now_s: float, solo_s: float) -> None:
        """Count an iteration that alone would have taken `solo_s`."""
        elapsed_s = self.job_time_s(now_s)
        bound_s = self.spec.slo * self.spec.profile.solo_s * (1 + _TOLERANCE)
        self.iterations_in_bound += elapsed_s - self.iteration_began_s <= bound_s
        self.iteration_began_s = elapsed_s
        self.iterations_done += 1
        self.solo_realised_s += solo_s

    def record_crash(self) -> None:
        """Stop the clock at the start of the broken iteration, which is repeated."""
        self.crashes += 1
        self._settled_s = None
        self.spent_s, self.clock_s = self.iteration_began_s, None

    def row(self, end_s: float) -> JobRow:
        """The job's row of the report."""
        spec = self.spec
        elapsed_s = (
            self.iteration_began_s if self.finished_s is not None else self.job_time_s(end_s)
        )
        bound_s = spec.slo * spec.iterations * spec.profile.solo_s
        realised_s = spec.slo * self.solo_realised_s
        broken = self.iterations_done - self.iterations_in_bound
        queued_until_s = self.placed_s if self.placed_s is not None else end_s
        begun_s = self.first_permit_s if self.first_permit_s is not None else queued_until_s
        return JobRow(
            job=spec.job,
            slo=spec.slo,
            iterations=spec.iterations,
            iterations_done=self.iterations_done,
            arrival_s=spec.arrival_s,
            placed_s=self.placed_s,
            finished_s=self.finished_s,
            queued_s=queued_until_s - spec.arrival_s,
            start_delay_s=begun_s - queued_until_s,
            elapsed_s=elapsed_s,
            bound_s=bound_s,
            solo_realised_s=self.solo_realised_s,
            kept_slo=elapsed_s <= bound_s * (1 + _TOLERANCE)
            and (spec.slo_scope == "job" or broken * ITERATIONS_PER_MOVE <= self.iterations_done),
            kept_slo_realised=elapsed_s <= realised_s * (1 + _TOLERANCE),
            iterations_in_bound=self.iterations_in_bound,
            strategy=self.strategy,
            group=self.group,
            moves=self.moves,
            shortest_stay_s=self.shortest_stay_s,
            crashes=self.crashes,
            reason=self.reason,
        )


@dataclass(slots=True)
class PoolAccount:
    """Rent and use of a pool, in node seconds; `devices` are rented now, at most `peak` at once."""

    kind: NodeType
    rented_s: float = 0.0
    run_s: float = 0.0
    switch_s: float = 0.0
    devices: int = 0
    peak: int = 0


@dataclass(slots=True)
class FleetAccount:
    """Rent and use of all nodes; a part of a node counts as the share of its devices."""

    pools: dict[Role, PoolAccount]
    keep_spans: bool
    cost: float = 0.0
    switches: int = 0
    _since_s: dict[NodeId, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    rentals: list[Rental] = field(default_factory=list)
    steps: list[CostStep] = field(default_factory=list)

    def _devices_of(self, node: NodeId) -> int:
        devices = place_devices(node)
        return self.pools[role_of(node)].kind.devices if devices is None else len(devices)

    def rent(self, nodes: tuple[NodeId, ...], now_s: float) -> None:
        """Start paying for nodes."""
        for node in nodes:
            pool = self.pools[role_of(node)]
            self._since_s[node] = now_s
            pool.devices += self._devices_of(node)
            pool.peak = max(pool.peak, pool.devices)
        self._step(now_s)

    def give_back(self, nodes: tuple[NodeId, ...], now_s: float) -> None:
        """Stop paying for nodes."""
        for node in nodes:
            pool, began_s = self.pools[role_of(node)], self._since_s.pop(node)
            devices = self._devices_of(node)
            pool.devices -= devices
            pool.rented_s += (now_s - began_s) * devices / pool.kind.devices
            self.cost += (now_s - began_s) / 3600 * (devices * pool.kind.device_price_per_h)
            if self.keep_spans:
                self.rentals.append(Rental(node, began_s, now_s))
        self._step(now_s)

    def list_rented(self) -> list[NodeId]:
        """Rented nodes, sorted."""
        return sorted(self._since_s)

    def record_phase(
        self,
        job: JobId,
        phase: Phase,
        nodes: tuple[NodeId, ...],
        times_s: tuple[float, float, float],
        shrunk_s: float | None,
        kept_share: float,
        beside_s: float,
    ) -> None:
        """Record a phase that held nodes. `times_s`: when it began, its switch ended, and it ended.
        From `shrunk_s` on it had only `kept_share` of their devices; for `beside_s` of node
        time their devices were with other rollouts' tails.
        """
        began_s, switched_s, ended_s = times_s
        whole_until_s = ended_s if shrunk_s is None else shrunk_s
        busy_s = whole_until_s - switched_s + kept_share * (ended_s - whole_until_s) - beside_s
        for node in nodes:
            pool = self.pools[role_of(node)]
            share = self._devices_of(node) / pool.kind.devices
            pool.switch_s += (switched_s - began_s) * share
            pool.run_s += busy_s * share
            if not self.keep_spans:
                continue
            if switched_s > began_s:
                self.spans.append(Span(node, job, phase, began_s, switched_s, "switch"))
            self.spans.append(Span(node, job, phase, switched_s, whole_until_s, "run"))
            if shrunk_s is not None:
                self.spans.append(Span(node, job, phase, shrunk_s, ended_s, "tail"))

    def use(self, role: Role) -> PoolUse:
        """Use of a pool's node time."""
        pool = self.pools[role]
        peak_nodes = -(-pool.peak // pool.kind.devices)
        return PoolUse(pool.rented_s / 3600, pool.run_s / 3600, pool.switch_s / 3600, peak_nodes)

    def _step(self, now_s: float) -> None:
        pools = self.pools.values()
        price = sum(pool.kind.price_per_h * pool.devices / pool.kind.devices for pool in pools)
        if self.steps and self.steps[-1].at_s == now_s:
            self.steps.pop()
        self.steps.append(CostStep(now_s, price))


@cache
def role_of(node: NodeId) -> Role:
    """Nodes are named for their pool (`rollout-3`)."""
    return Role(node.partition("-")[0])
