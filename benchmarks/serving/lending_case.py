"""One simulated run of a serving cluster with rollouts beside it, and how much load its service
bears alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.rollout.simulated.agent_run import AgentFleet
from benchmarks.serving.arrivals import scaled
from benchmarks.serving.simulated.autoscaling import AutoscaledCluster
from benchmarks.serving.simulated.least_stage import least_stage_s
from benchmarks.serving.simulated.lending_cluster import LendingCluster, LendingPlan, ServingRole
from benchmarks.serving.simulated.run import CoservingRun, RolloutStages
from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.modes import LendingMode, find_mode
from slackwater.sim.rollout.agent_trace import draw_games
from slackwater.sim.rollout.engine_cost import H800, QWEN3_8B, QWEN3_32B, EngineCost, SharedDevice
from slackwater.sim.serving.serving_trace import Arrival

AUTOSCALE = (
    "autoscale"  # a peer's way, which is a cluster of another kind rather than a mode of a device
)
MIXED = (ServingRole.MIXED,) * 4
SPLIT = (ServingRole.PREFILL, *((ServingRole.DECODE,) * 3))  # ROSE 6: one to three
WHOLE = (ServingRole.PREFILL, *((ServingRole.DECODE,) * 2), *((ServingRole.MIXED,) * 2))
_DENSITIES = (0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0)


@dataclass(frozen=True, slots=True)
class LendingCase:
    """One run. `arrivals` are those of the first `seconds`, `density` multiplies them; rollouts
    begin at `begins_s`; `lease_s` replaces the mode's own. `large` is a 32B shape on four devices
    instead of an 8B shape on one.
    """

    group: str
    arrivals: Sequence[Arrival]
    seconds: float
    slo: ServingSlo
    games: int
    mode: str = "none"
    density: float = 1.0
    roles: tuple[ServingRole, ...] = MIXED
    large: bool = False
    lease_s: float | None = None
    stages: int = 1
    begins_s: float = 1.0
    seed: int = 0

    @property
    def engine(self) -> EngineCost:
        return EngineCost(QWEN3_32B, H800, 4) if self.large else EngineCost(QWEN3_8B, H800, 1)


@dataclass(frozen=True, slots=True)
class LendingOutcome:
    """Which requests got what was promised, and what rollouts got of the devices. `harvest` is
    what they had of the time that the service's promise left free while they borrowed; no rule
    makes a stage shorter than `least_s` with that time.
    """

    met: NDArray[np.bool_]
    ttft_p99_ms: float
    ttft_p999_ms: float
    tpot_p99_ms: float
    rollout_s: float
    least_s: float
    serving_share: float
    rollout_share: float
    cuts: int
    harvest: float


def outcome_of(case: LendingCase) -> LendingOutcome:
    """Run it."""
    engine = case.engine
    plan = LendingPlan(
        SharedDevice(engine, engine),
        case.slo,
        len(case.roles),
        _mode(case),
        turns_per_node=16 * engine.devices,
        seed=case.seed,
        roles=case.roles,
    )
    arrivals = scaled(case.arrivals, case.density, case.seconds, case.seed)
    games, fleet = draw_games(case.games, case.seed), AgentFleet(engine, 2)
    stages = RolloutStages(games, case.stages if case.games else 0)
    cluster = AutoscaledCluster if case.mode == AUTOSCALE else LendingCluster
    run = CoservingRun(plan, fleet, stages, arrivals, cluster=cluster)
    result = run.run(case.seconds, begins_s=case.begins_s)
    return LendingOutcome(
        result.met(case.slo),
        result.percentile_ms("ttft", 0.99),
        result.percentile_ms("ttft", 0.999),
        result.percentile_ms("tpot", 0.99),
        result.rollout_s,
        least_stage_s(games, fleet, plan.nodes * result.free_share) if games else 0.0,
        result.serving_share,
        result.rollout_share,
        result.cuts,
        result.harvest,
    )


def most_density(case: LendingCase) -> float:
    """The largest density at which the service alone keeps its promise, with a tenth of the misses
    allowed.
    """
    found = _DENSITIES[0]
    for density in _DENSITIES:
        outcome = outcome_of(replace(case, mode="none", density=density, games=0))
        if outcome.met.mean() < 1.0 - (1.0 - case.slo.share) / 10:
            break
        found = density
    return found


def _mode(case: LendingCase) -> LendingMode:
    mode = find_mode("prefix" if case.mode == AUTOSCALE else case.mode)
    return mode if case.lease_s is None else replace(mode, lease_s=case.lease_s)
