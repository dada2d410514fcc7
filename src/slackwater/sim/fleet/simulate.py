"""One scenario of the planner, turn by turn and operation by operation: `simulate_jointly`.

The jobs, the fleet and the policy are the scenario's. What the planner takes as a phase's length
comes here from turns on engines and operations on trainers: as many frames fit into a worst-case
rollout as a turn may have tokens, so a rollout is over when its longest response is.
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
    """What a run came to. `engine_s` and `trainer_s` are the jobs' accounts, summed up."""

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
    """Run a scenario to its end under the fleet controller, with the co-scheduler that it asks for
    or with `scheduler`; `draw` gets its timeline."""
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
        *(scenario.name, scenario.policy.name, scenario.seed, fleet.events, fleet.now_s),
        len(specs),
        sum(entry.stage is JobStage.FINISHED for entry in entries),
        sum(entry.stage is JobStage.REFUSED for entry in entries),
        *(fleet.clients.iterations, fleet.clients.completed),
        fleet.controller.rollout.books.counters.moved,
        *(fleet.tail_migrations, fleet.engines.pulls),
        int(fleet.controller.weights.gauges()["repeated_pulls"]),
        sum(account.engine_s for account in accounts),
        sum(account.trainer_s for account in accounts),
        sum(account.turns_waited_s for account in accounts),
        *(_used(fleet, role) for role in (Role.ROLLOUT, Role.TRAIN)),
    )


def _used(fleet: SimulatedFleet, role: Role) -> float:
    """The share of its time in which a phase held a node, of those that had any."""
    nodes = [node for node in fleet.scheduler.nodes if node.startswith(role.value)]
    used = [fleet.spans.utilisation(node, fleet.now_s) for node in nodes]
    busy = [share for share in used if share > 0]
    return sum(busy) / max(len(busy), 1)
