"""A simulated cluster, as a user writes it down: fleet, jobs, policy, and what may go wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from slackwater.model.errors import ConfigError, check_not_negative
from slackwater.model.job import JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.model.switching import SwitchCosts
from slackwater.policy.placement.fleet import FleetView
from slackwater.sim.cluster.workload import CycleWorkload, ProductionWorkload, ProfileWorkload

_MOST_RESPONSES = 100_000

Workload = ProductionWorkload | ProfileWorkload | CycleWorkload


def _check_share(where: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ConfigError.of(f"{where}: {name}", value, "must lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Which placement policy, its own options, and the order of phases.

    `ordering` "auto" takes the one that belongs to the policy. `slo_basis` "realised" bounds a
    job's time against what its own phases would take alone, for scenarios whose lengths drift
    beyond the declared ones.
    """

    name: str = "interleaving"
    ordering: Literal["auto", "round_robin", "plan", "hrrs", "fcfs"] = "auto"
    backfill: bool = True
    guard: Literal["auto", "yes", "no"] = "auto"
    regroup_every_s: float = 0.0
    slo_basis: Literal["declared", "realised"] = "declared"
    options: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_not_negative("policy: ", self, "regroup_every_s")


@dataclass(frozen=True, slots=True)
class LengthConfig:
    """How long phases really are, as shares of the declared worst case.

    "worst" takes every phase at its worst. "long_tail" draws each response's length from a
    log-normal with median `median_share` of the token limit and log-deviation `sigma`, cut at the
    limit. A decode step reads the weights once and every live response's KV cache, so a rollout
    takes `(1 - kv_share) * longest + kv_share * mean` of its worst case; a train phase takes
    `mean`. "quantiles" draws each response's share of the token limit from `quantiles`, which
    stand at even steps from the shortest response to the longest.
    """

    kind: Literal["worst", "long_tail", "quantiles"] = "worst"
    responses: int = 256
    median_share: float = 0.25
    sigma: float = 0.9
    kv_share: float = 0.4
    quantiles: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_share("lengths", median_share=self.median_share, kv_share=self.kv_share)
        if self.kind == "quantiles" and (len(self.quantiles) < 2 or self.quantiles[-1] == 0):
            fix = "must be 2 or more, the last above 0"
            raise ConfigError.of("lengths: quantiles", list(self.quantiles), fix)
        for low, high in pairwise((0.0, *self.quantiles, 1.0)):
            if low > high:
                raise ConfigError.of(
                    "lengths: quantiles", high, "must lie between 0 and 1 and never fall"
                )
        check_not_negative("lengths: ", self, "sigma")
        if self.median_share == 0:
            raise ConfigError.of("lengths: median_share", self.median_share, "must be above 0")
        if not 0 < self.responses <= _MOST_RESPONSES:
            raise ConfigError.of(
                "lengths: responses", self.responses, f"must be 1 to {_MOST_RESPONSES}"
            )


@dataclass(frozen=True, slots=True)
class TailConfig:
    """Long-tail migration (WEAVE 4.3): at `threshold` responses done, the rest move to
    `keep_share` of the devices.
    """

    enabled: bool = True
    threshold: float = 0.8
    keep_share: float = 0.25

    def __post_init__(self) -> None:
        _check_share("tail", threshold=self.threshold, keep_share=self.keep_share)


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """Crashes of jobs and losses of nodes, at exponential gaps; late and doubled messages."""

    job_crashes_per_h: float = 0.0
    node_losses_per_h: float = 0.0
    repair_s: float = 2300.0
    doubled_message_share: float = 0.0

    def __post_init__(self) -> None:
        _check_share("faults", doubled_message_share=self.doubled_message_share)
        check_not_negative("faults: ", self, "job_crashes_per_h", "node_losses_per_h", "repair_s")


@dataclass(frozen=True, slots=True)
class DriftConfig:
    """Phase lengths that change over a job's life (WEAVE 6.6): each job draws a template of the
    setting.

    `growth` is by how much the rollout has grown at the end under the increasing 1.0x template;
    train lengths follow with `train_follows` of it.
    """

    setting: Literal["none", "increasing", "decreasing", "mixed"] = "none"
    growth: float = 0.4
    train_follows: float = 0.5

    def __post_init__(self) -> None:
        check_not_negative("drift: ", self, "growth", "train_follows")


def default_fleet() -> tuple[Pool, ...]:
    """As many H20 and H800 nodes as anybody wants."""
    return (Pool(Role.ROLLOUT, H20, 4096), Pool(Role.TRAIN, H800, 4096))


@dataclass(frozen=True, slots=True)
class ClusterScenario:
    """Everything that decides a simulated run. The same scenario gives the same run.

    Jobs are listed, or drawn from `workload`; with both, the drawn ones come in addition.
    """

    name: str = "cluster"
    fleet: tuple[Pool, ...] = field(default_factory=default_fleet)
    jobs: tuple[JobSpec, ...] = ()
    workload: Workload | None = None
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    lengths: LengthConfig = field(default_factory=LengthConfig)
    tail: TailConfig = field(default_factory=TailConfig)
    switching: SwitchCosts = field(default_factory=SwitchCosts)
    faults: FaultConfig = field(default_factory=FaultConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.jobs and self.workload is None:
            raise ConfigError("jobs: empty, and no workload is given; list jobs or add [workload]")
        for role in (Role.ROLLOUT, Role.TRAIN):
            if sum(pool.role is role for pool in self.fleet) != 1:
                raise ConfigError(f"fleet: must hold exactly one pool with role = {role.value!r}")
        check_not_negative("scenario: ", self, "seed")
        names = [job.job for job in self.jobs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError.of("jobs: job", name, "is used twice; give every job its own id")

    def pool(self, role: Role) -> Pool:
        """The fleet's pool of a role."""
        return next(pool for pool in self.fleet if pool.role is role)

    def view(self) -> FleetView:
        """The fleet as placement sees it."""
        rollout, train = self.pool(Role.ROLLOUT), self.pool(Role.TRAIN)
        return FleetView(rollout, train, switching=self.switching)
