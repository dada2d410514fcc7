"""A scenario of the planner, simulated by turns and operations: `simulate_jointly`.

Jobs, fleet and policy are the scenario's. Phase lengths follow from turns on engines and operations
on trainers: a worst-case rollout has one frame per token of the longest turn, so a rollout ends
with its longest response.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.model.job_life import JobStage
from slackwater.model.node import Role
from slackwater.sim.cluster.scenario import ClusterScenario
from slackwater.sim.cluster.simulate import new_controller, scenario_jobs
from slackwater.sim.fleet.costs import FleetCosts
from slackwater.sim.fleet.fleet import SimulatedFleet
from slackwater.sim.fleet.job import TurnPlan
from slackwater.timeline.spans import Timeline


@dataclass(frozen=True, slots=True)
class JointRunReport:
    """The result of a run. `engine_s` and `trainer_s` are sums over the jobs' accounts."""

    scenario: str
    policy: str
    seed: int
    events: int
    end_s: float
    jobs: int
    finished_jobs: int
    refused_jobs: int
    iterations: int
    turns: int
    moved_turns: int
    tail_migrations: int
    pulls: int
    repeated_pulls: int
    engine_s: float
    trainer_s: float
    turns_waited_s: float
    rollout_utilisation: float
    train_utilisation: float


def _has_seen(fleet: SimulatedFleet, events: int) -> bool:
    return fleet.events >= events


def simulate_jointly(
    scenario: ClusterScenario,
    *,
    plan: TurnPlan | None = None,
    costs: FleetCosts | None = None,
    scheduler: CoScheduler | None = None,
    progress: Callable[[float], None] | None = None,
    draw: Callable[[Timeline], None] | None = None,
) -> JointRunReport:
    """Run a scenario to its end under the fleet controller, with `scheduler` or the scenario's
    co-scheduler; `draw` gets its timeline.
    """
    specs = scenario_jobs(scenario)
    fleet = SimulatedFleet(
        scheduler or new_controller(scenario), specs, seed=scenario.seed, plan=plan, costs=costs
    )
    while fleet.unsettled:
        fleet.run(stop=partial(_has_seen, fleet, fleet.events + 2000))
        if progress is not None:
            progress(1 - fleet.unsettled / len(specs))
    fleet.controller.check_integrity()
    fleet.check_integrity()
    if draw is not None:
        title = f"{scenario.name}, turn by turn"
        draw(fleet.spans.timeline(scenario.policy.name, title, fleet.now_s))
    entries = fleet.controller.jobs.entries()
    accounts = [entry.account for entry in entries]
    return JointRunReport(
        scenario=scenario.name,
        policy=scenario.policy.name,
        seed=scenario.seed,
        events=fleet.events,
        end_s=fleet.now_s,
        jobs=len(specs),
        finished_jobs=sum(entry.stage is JobStage.FINISHED for entry in entries),
        refused_jobs=sum(entry.stage is JobStage.REFUSED for entry in entries),
        iterations=fleet.clients.iterations,
        turns=fleet.clients.completed,
        moved_turns=fleet.controller.rollout.state.counters.moved,
        tail_migrations=fleet.tail_migrations,
        pulls=fleet.engines.pulls,
        repeated_pulls=int(fleet.controller.weights.gauges()["repeated_pulls"]),
        engine_s=sum(account.engine_s for account in accounts),
        trainer_s=sum(account.trainer_s for account in accounts),
        turns_waited_s=sum(account.turns_waited_s for account in accounts),
        rollout_utilisation=_utilisation(fleet, Role.ROLLOUT),
        train_utilisation=_utilisation(fleet, Role.TRAIN),
    )


def _utilisation(fleet: SimulatedFleet, role: Role) -> float:
    """The mean share of time in which nodes ran phases, over nodes that ran any."""
    nodes = [node for node in fleet.scheduler.nodes if node.startswith(role.value)]
    used = [fleet.spans.utilisation(node, fleet.now_s) for node in nodes]
    busy = [share for share in used if share > 0]
    return sum(busy) / max(len(busy), 1)
