"""The two pools that placement rents from, and what a job needs on them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from slackwater.model.errors import ConfigError, check_not_negative
from slackwater.model.ids import NodeId
from slackwater.model.job import JobProfile
from slackwater.model.node import Pool, Role
from slackwater.model.placement import place_devices, place_on
from slackwater.model.switching import SwitchCosts

# Longer than every budget. Not infinite, because the compiled scans add to it.
_NEVER_S = 1e15
_SWITCHING = SwitchCosts()


@dataclass(frozen=True, slots=True)
class MoveCost:
    """The time that a job loses when it restarts on other nodes, by model size: 197 s at 7B, 419 s
    at 32B (WEAVE 6.6).
    """

    base_s: float = 134.84
    s_per_billion: float = 8.88

    def __post_init__(self) -> None:
        check_not_negative("move: ", self, "base_s", "s_per_billion")

    def restart_s(self, profile: JobProfile) -> float:
        return self.base_s + self.s_per_billion * profile.model_billions


@dataclass(frozen=True, slots=True)
class FleetView:
    """A rollout pool and a train pool, rented node by node up to their limits. Without
    `engines_on_train_nodes` no job can roll out on train nodes.
    """

    rollout: Pool
    train: Pool
    move: MoveCost = MoveCost()
    engines_on_train_nodes: bool = True
    switching: SwitchCosts = _SWITCHING

    def __post_init__(self) -> None:
        if self.rollout.role is not Role.ROLLOUT:
            raise ConfigError.of("fleet: rollout", self.rollout.role, "must be a rollout pool")
        if self.train.role is not Role.TRAIN:
            raise ConfigError.of("fleet: train", self.train.role, "must be a train pool")

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(
            node for role in (Role.ROLLOUT, Role.TRAIN) for node in self.list_places(role, 0)
        )

    def list_places(self, role: Role, devices: int) -> list[NodeId]:
        """All nodes of a role, or all their parts with `devices` devices; 0 means whole nodes."""
        pool = self.rollout if role is Role.ROLLOUT else self.train
        nodes = [NodeId(f"{role.value}-{number}") for number in range(pool.max_nodes)]
        whole = pool.node_type.devices
        if devices in (0, whole):
            return nodes
        starts = range(0, whole, devices)
        return [place_on(node, first, devices) for node in nodes for first in starts]

    @property
    def owned(self) -> bool:
        """Whether both pools are paid for anyway, so that only completion time counts, not rent."""
        return self.rollout.owned and self.train.owned

    def parts(self, profile: JobProfile) -> tuple[int, int]:
        """How many devices a job uses of each of its rollout nodes and of each train node."""
        return (
            self.rollout.part_devices(profile.rollout_devices),
            self.train.part_devices(profile.train_devices),
        )

    def with_parts(self, rollout_devices: int, train_devices: int) -> "FleetView":
        """The fleet for jobs of one part size: its nodes are parts with so many devices."""
        return replace(
            self,
            rollout=self.rollout.with_parts(rollout_devices),
            train=self.train.with_parts(train_devices),
        )

    def with_node_counts(self, profile: JobProfile) -> JobProfile:
        """Fill in the numbers of nodes of a profile that declares devices."""
        for field, pool in (("rollout", self.rollout), ("train", self.train)):
            devices = getattr(profile, f"{field}_devices")
            if devices:
                nodes = -(-devices // pool.node_type.devices)
                profile = replace(profile, **{f"{field}_nodes": nodes})
        return profile

    def rent_per_h(self, places: Iterable[NodeId]) -> float:
        """The hourly rent of nodes and parts of nodes; a part costs by its devices."""
        rent = 0.0
        for place in places:
            kind = (self.train if place.startswith(Role.TRAIN) else self.rollout).node_type
            devices = place_devices(place)
            rent += kind.device_price_per_h * (kind.devices if devices is None else len(devices))
        return rent

    def solo_price_per_h(self, profile: JobProfile) -> float:
        """The hourly rent of a job's own nodes, or parts of nodes."""
        profile, parts = self.with_node_counts(profile), self.parts(profile)
        return self.with_parts(*parts).price_per_h(profile.rollout_nodes, profile.train_nodes)

    def price_per_h(self, rollout_nodes: int, train_nodes: int) -> float:
        return (
            rollout_nodes * self.rollout.node_type.price_per_h
            + train_nodes * self.train.node_type.price_per_h
        )

    def switch_s(self, profile: JobProfile) -> float:
        """The time in each phase in which the job's state is loaded. It does not depend on the
        number of nodes.
        """
        warm_s = self.switching.warm_s(profile.model_billions)
        return min(warm_s, profile.rollout_s, profile.train_s)

    def train_s(self, profile: JobProfile, train_nodes: int) -> float:
        """The length of a train phase, with data parallelism over `train_nodes` nodes."""
        return self._scale_s(profile, profile.train_s, profile.train_nodes / train_nodes)

    def local_rollout_s(self, profile: JobProfile, train_nodes: int) -> float:
        """The length of a rollout phase on train nodes."""
        if not self.engines_on_train_nodes:
            return _NEVER_S
        return self._scale_s(profile, profile.rollout_s, self.local_scale(profile, train_nodes))

    def _scale_s(self, profile: JobProfile, declared_s: float, scale: float) -> float:
        """The length of a phase whose work takes `scale` times as long; loading its state
        does not.
        """
        switch_s = self.switch_s(profile)
        return switch_s + (declared_s - switch_s) * scale

    def local_scale(self, profile: JobProfile, train_nodes: int) -> float:
        """How much longer a rollout's work takes on train nodes: the ratio of the memory
        bandwidths, which limit decoding.
        """
        rollout_devices, train_devices = self.parts(profile)
        bandwidth = (
            self.rollout.node_type.hbm_tb_per_s
            * rollout_devices
            / (self.train.node_type.hbm_tb_per_s * train_devices)
        )
        return bandwidth * profile.rollout_nodes / train_nodes

    def explain_infeasible(self, profile: JobProfile) -> str | None:
        """Why a job does not fit even on its own nodes in an empty fleet, or None if it fits."""
        needs = (
            ("rollout", self.rollout, profile.rollout_nodes, profile.rollout_state_gb),
            ("train", self.train, profile.train_nodes, profile.train_state_gb),
        )
        for role, pool, nodes, state_gb in needs:
            if nodes > pool.max_nodes:
                devices = getattr(profile, f"{role}_devices")
                whole = f" ({devices} devices)" if devices else ""
                return (
                    f"needs {nodes} {role} nodes{whole} and the pool has {pool.max_nodes}; ask for "
                    "fewer or raise max_nodes"
                )
            memory_gb = pool.node_type.host_memory_gb
            if state_gb > memory_gb:
                return (
                    f"keeps {state_gb:g} GB on a {role} node and a {pool.node_type.name} has "
                    f"{memory_gb:g} GB "
                    "of host memory; use more parallelism or larger nodes"
                )
        return None

    def explain_infeasible_local(self, profile: JobProfile) -> str | None:
        """Why a job can never run all its phases on train nodes, or None if it can."""
        if not self.engines_on_train_nodes:
            return (
                "would roll out on train nodes, which have no engines; choose a placement with "
                "rollout nodes"
            )
        if profile.train_nodes > self.train.max_nodes:
            return (
                f"needs {profile.train_nodes} train nodes and the pool has "
                f"{self.train.max_nodes}; ask for fewer or raise max_nodes"
            )
        both_gb = profile.rollout_state_gb + profile.train_state_gb
        memory_gb = self.train.node_type.host_memory_gb
        if both_gb > memory_gb:
            return (
                f"keeps {both_gb:g} GB of rollout and train state on a train node and a "
                f"{self.train.node_type.name} has "
                f"{memory_gb:g} GB of host memory; place it on separate nodes"
            )
        return None
