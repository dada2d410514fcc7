"""Placement of jobs that need only some devices of a node.

Jobs with equally large parts of nodes share groups, under one policy for each part size. All these
policies rent from the same stock of nodes.
"""

from collections.abc import Callable, Collection, Sequence

from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import Role
from slackwater.model.placement import Placement, Refusal, node_of, overlap, place_devices
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.grouped import GroupedPlacement
from slackwater.policy.placement.interface import JobProgress
from slackwater.policy.placement.rented_nodes import NodeStock, RentedNodes, take_changes_of

# How many devices of a rollout node and of a train node a job uses.
Parts = tuple[int, int]


class PlacementBySize:
    """Keeps one policy for each part size; `make` creates the policy for a view of the fleet. The
    methods are those of `PlacementPolicy`.
    """

    def __init__(self, fleet: FleetView, make: Callable[[FleetView], GroupedPlacement]) -> None:
        self._fleet = fleet
        self._make = make
        pools = {Role.ROLLOUT: fleet.rollout, Role.TRAIN: fleet.train}
        self._stocks = {role: NodeStock(pool) for role, pool in pools.items()}
        self._whole: Parts = (fleet.rollout.node_type.devices, fleet.train.node_type.devices)
        self._policies: dict[Parts, GroupedPlacement] = {}
        self._parts: dict[JobId, Parts] = {}
        self.name = self._policy_of(self._whole).name

    def _policy_of(self, parts: Parts) -> GroupedPlacement:
        policy = self._policies.get(parts)
        if policy is None:
            view = self._fleet if parts == self._whole else self._fleet.with_parts(*parts)
            policy = self._policies[parts] = self._make(view)
            policy.registry.ledger = RentedNodes(view, self._stocks)
            if parts != self._whole:
                policy.registry.name = f"group-{parts[0]}x{parts[1]}"
        return policy

    def observe(self, progress: Sequence[JobProgress], waiting: Sequence[JobSpec] = ()) -> None:
        """Pass the progress of placed jobs and the waiting jobs to the policies of their sizes."""
        if len(self._policies) == 1:
            self._policy_of(self._whole).observe(progress, waiting)
            return
        placed: dict[Parts, list[JobProgress]] = {}
        for report in progress:
            placed.setdefault(self._parts[report.job], []).append(report)
        wanting = self._group_by_parts(waiting)
        for parts, policy in self._policies.items():
            if parts in placed or parts in wanting:
                policy.observe(placed.get(parts, ()), wanting.get(parts, ()))

    def _group_by_parts(self, waiting: Sequence[JobSpec]) -> dict[Parts, list[JobSpec]]:
        groups: dict[Parts, list[JobSpec]] = {}
        for spec in waiting:
            groups.setdefault(self._fleet.parts(spec.profile), []).append(spec)
        return groups

    def admission_order(self, waiting: Sequence[JobSpec]) -> Sequence[JobId]:
        """Merge the orders of all policies; between two of them the earlier arrival goes first."""
        if len(self._policies) == 1:
            return self._policy_of(self._whole).admission_order(waiting)
        places = {spec.job: number for number, spec in enumerate(waiting)}
        order: list[tuple[int, int, JobId]] = []
        for number, (parts, queue) in enumerate(self._group_by_parts(waiting).items()):
            latest = 0
            for job in self._policy_of(parts).admission_order(queue):
                latest = max(latest, places[job])
                order.append((latest, number, job))
        return [job for _, _, job in sorted(order, key=lambda one: one[:2])]

    def place(self, job: JobSpec, now_s: float) -> Placement | Refusal:
        parts = self._fleet.parts(job.profile)
        answer = self._policy_of(parts).place(job, now_s)
        if isinstance(answer, Placement):
            self._parts[job.job] = parts
        return answer

    def remove(self, job: JobId) -> None:
        self._policy_of(self._parts.pop(job)).remove(job)

    def revise(self, job: JobId, profile: JobProfile, now_s: float) -> Sequence[Placement]:
        return self._policy_of(self._parts[job]).revise(job, profile, now_s)

    def isolate(self, job: JobId, now_s: float) -> Sequence[Placement]:
        return self._policy_of(self._parts[job]).isolate(job, now_s)

    def rebalance(self, now_s: float, profile: JobProfile | None = None) -> Sequence[Placement]:
        sizes = self._policies if profile is None else (self._fleet.parts(profile),)
        return [
            move for parts in sizes for move in self._policy_of(parts).rebalance(now_s, profile)
        ]

    def next_rebalance_s(self, profile: JobProfile, now_s: float) -> float | None:
        return self._policy_of(self._fleet.parts(profile)).next_rebalance_s(profile, now_s)

    def list_rented(self) -> Sequence[NodeId]:
        """All rented nodes and parts of nodes, sorted within each size."""
        return [node for policy in self._policies.values() for node in policy.list_rented()]

    def take_rent_changes(self) -> tuple[Collection[NodeId], Collection[NodeId]]:
        return take_changes_of(self._stocks.values())

    def hourly_cost(self) -> float:
        return sum(policy.hourly_cost() for policy in self._policies.values())

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of a policy does not hold, or a device is rented
        twice.
        """
        held: dict[NodeId, list[NodeId]] = {}
        for policy in self._policies.values():
            policy.check_integrity()
            for place in policy.list_rented():
                held.setdefault(node_of(place), []).append(place)
        for places in held.values():
            for number, place in enumerate(places):
                twice = [other for other in places[:number] if overlap(place, other)]
                assert not twice, f"{place} is rented twice: {twice}"
        for role, pool in ((Role.ROLLOUT, self._fleet.rollout), (Role.TRAIN, self._fleet.train)):
            used = sum(
                len(place_devices(place) or range(pool.node_type.devices))
                for places in held.values()
                for place in places
                if place.startswith(role)
            )
            devices = pool.max_nodes * pool.node_type.devices
            assert used == self._stocks[role].used, f"{used} {role} devices are rented"
            assert used <= devices, f"{used} {role} devices are rented, {devices} are there"
