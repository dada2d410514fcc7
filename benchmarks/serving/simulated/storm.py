"""Seeded storms: bursts, slow devices, services that stop lending, engines that die, RL steps that
follow each other; invariants after every event.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.rollout.simulated.agent_run import ROLLOUT_JOB, AgentFleet
from benchmarks.serving.simulated.lending_cluster import LendingPlan, ServingRole
from benchmarks.serving.simulated.run import CoservingResult, CoservingRun, RolloutStages
from harness.serving_checks import check_serving
from slackwater.control.lending import events as on
from slackwater.control.lending.lender import LenderSettings
from slackwater.model.ids import InstanceId, ServiceName
from slackwater.model.instance import InstanceKind
from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.lender_choice import LenderRule
from slackwater.policy.serving.modes import find_mode
from slackwater.sim.rollout.agent_trace import draw_games
from slackwater.sim.rollout.engine_cost import H800, QWEN3_8B, EngineCost, SharedDevice
from slackwater.sim.serving.serving_trace import draw_arrivals

_ROLES = (
    (ServingRole.MIXED,) * 3,
    (ServingRole.PREFILL, ServingRole.DECODE, ServingRole.DECODE),
)
_CHECK_EVERY = 50  # events; a whole check of every node costs more than an event


@dataclass(frozen=True, slots=True)
class StormResult:
    """What happened, and that every request of the service and every turn came to its end."""

    result: CoservingResult
    requests: int
    unanswered: int
    faults: int


def run_storm(seed: int, *, seconds: float = 60.0, mode: str = "ours") -> StormResult:
    """One storm; raises AssertionError if an invariant breaks."""
    rng = np.random.default_rng(seed)
    # Little memory, so that budgets are cut.
    engine = EngineCost(QWEN3_8B, H800, 1, memory_share=float(rng.uniform(0.46, 0.75)))
    plan = LendingPlan(
        SharedDevice(engine, engine, noise=float(rng.uniform(0.0, 0.3))),
        ServingSlo(0.5, 0.15),
        3,
        find_mode(mode),
        roles=_ROLES[int(rng.integers(2))],
        lender=LenderSettings(LenderRule(rest_s=3.0), window_s=5.0, review_every_s=1.0),
        seed=seed,
    )
    arrivals = draw_arrivals(
        seconds,
        seed,
        rate=float(rng.uniform(1, 12)),
        burst_every_s=8.0,
        burst_requests=int(rng.integers(5, 60)),
    )
    games = [session[:8] for session in draw_games(24, seed)]
    stages = RolloutStages(games, 2, train_s=3.0)
    run = CoservingRun(plan, AgentFleet(engine, 2), stages, arrivals)
    faults = _plant(run, rng, seconds, engine)
    events = 0

    def check() -> None:
        nonlocal events
        events += 1
        if events % _CHECK_EVERY == 0:
            check_serving(run.cluster)
            run.manager.check_integrity()

    result = run.run(seconds, check)
    counted = [one for one in run.cluster.requests if one.arrival_s < seconds]
    unanswered = sum(1 for one in counted if np.isnan(one.done_s))
    return StormResult(result, len(counted), unanswered, faults)


def _plant(run: CoservingRun, rng: np.random.Generator, seconds: float, engine: EngineCost) -> int:
    """Faults at random moments; how many."""
    body, cluster = run.body, run.cluster
    nodes = list(cluster.nodes.values())

    def die() -> None:
        if InstanceId("e0") in body.places:
            body.lose(InstanceId("e0"), "killed")
            kind = InstanceKind.DEDICATED
            spec = body.spec(InstanceId("e0"), kind, engine, max_running=16)
            body.join(spec, engine, holds="v0")

    def refuse() -> None:
        cluster.hear(on.LendingStopped(body.now_s, ServiceName("service"), "a storm"))
        body.schedule(body.now_s + 4.0, allow)

    def allow() -> None:
        cluster.hear(on.ServiceOpened(body.now_s, ServiceName("service"), 3))

    def step() -> None:
        cluster.hear(on.BorrowerStepBegan(body.now_s, ROLLOUT_JOB))

    def slow() -> None:
        node = nodes[int(rng.integers(len(nodes)))]
        node.slowdown = 3.0
        body.schedule(body.now_s + 3.0, partial(setattr, node, "slowdown", 1.0))

    count = int(rng.integers(3, 10))
    for at_s in rng.uniform(2.0, seconds, count).tolist():
        body.schedule(at_s, (die, refuse, slow, step)[int(rng.integers(4))])
    return count
