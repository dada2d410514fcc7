"""The two pools that placement rents from, and what a job needs on them."""

from dataclasses import dataclass

from slackwater.model.errors import ConfigError
from slackwater.model.ids import NodeId
from slackwater.model.job import JobProfile
from slackwater.model.node import Pool, Role

_NEVER_S = 1e15  # past every budget, and still a number that the compiled scans can add to


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Seconds that a job loses when it is stopped and restarted elsewhere: 197 s at 7B, 419 s at
    32B (WEAVE 6.6).
    """

    base_s: float = 134.84
    s_per_billion: float = 8.88

    def of(self, profile: JobProfile) -> float:
        """For one job."""
        return self.base_s + self.s_per_billion * profile.model_billions


@dataclass(frozen=True, slots=True)
class FleetView:
    """A rollout pool and a train pool, rented node by node up to their limits. Train nodes may be
    without engines: then nobody's rollouts are placed there.
    """

    rollout: Pool
    train: Pool
    move: MoveCost = MoveCost()
    engines_on_train_nodes: bool = True

    def __post_init__(self) -> None:
        if self.rollout.role is not Role.ROLLOUT:
            raise ConfigError.of("fleet: rollout", self.rollout.role, "must be a rollout pool")
        if self.train.role is not Role.TRAIN:
            raise ConfigError.of("fleet: train", self.train.role, "must be a train pool")

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """All that can be rented, by name."""
        return tuple(
            NodeId(f"{pool.role.value}-{number}")
            for pool in (self.rollout, self.train)
            for number in range(pool.max_nodes)
        )

    @property
    def owned(self) -> bool:
        """Whether both pools are paid for anyway: then jobs should be done soon, not cheaply."""
        return self.rollout.owned and self.train.owned

    def price_per_h(self, rollout_nodes: int, train_nodes: int) -> float:
        """Of so many rented nodes."""
        return (
            rollout_nodes * self.rollout.node_type.price_per_h
            + train_nodes * self.train.node_type.price_per_h
        )

    def local_rollout_s(self, profile: JobProfile, train_nodes: int) -> float:
        """Rollout time on train nodes: decoding is bound by memory bandwidth, and fewer nodes take
        longer.
        """
        if not self.engines_on_train_nodes:
            return _NEVER_S
        bandwidth = (
            self.rollout.node_type.hbm_tb_per_s
            * self.rollout.node_type.devices
            / (self.train.node_type.hbm_tb_per_s * self.train.node_type.devices)
        )
        return profile.rollout_s * bandwidth * profile.rollout_nodes / train_nodes

    def why_never(self, profile: JobProfile) -> str | None:
        """Why a job fits nowhere even on an empty fleet with its own nodes, or None if it does."""
        needs = (
            ("rollout", self.rollout, profile.rollout_nodes, profile.rollout_state_gb),
            ("train", self.train, profile.train_nodes, profile.train_state_gb),
        )
        for role, pool, nodes, state_gb in needs:
            if nodes > pool.max_nodes:
                return (
                    f"needs {nodes} {role} nodes and the pool has {pool.max_nodes}; ask for "
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

    def why_never_local(self, profile: JobProfile) -> str | None:
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
