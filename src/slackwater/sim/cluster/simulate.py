"""One scenario through the co-scheduler: `simulate(scenario)` gives a report, and can record the
run for replay.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from slackwater.control.coschedule.config import CoScheduleConfig, OrderingName, ordering_for
from slackwater.control.coschedule.events import EVENT_TYPES
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.control.record import Divergence, replay
from slackwater.model.config import decode, plain
from slackwater.model.errors import ConfigError
from slackwater.model.job import JobSpec
from slackwater.model.node import Role
from slackwater.policy.placement.catalogue import make_policy
from slackwater.sim.cluster.generate import generate_jobs
from slackwater.sim.cluster.report import RunReport
from slackwater.sim.cluster.scenario import ClusterScenario
from slackwater.sim.cluster.simulated_cluster import SimulatedCluster

_GUARDED = frozenset({"interleaving", "ours"})


def simulate(
    scenario: ClusterScenario,
    *,
    spans: bool = False,
    record: Callable[[bytes], None] | None = None,
    progress: Callable[[float], None] | None = None,
    check_every: int = 2000,
) -> RunReport:
    """Run a scenario to its end. `record` gets one line per event; `progress` the share of jobs
    done.
    """
    specs = scenario_jobs(scenario)
    controller = new_controller(scenario)
    if record is not None:
        record(
            msgspec.json.encode({"scenario": plain(replace(scenario, jobs=specs, workload=None))})
            + b"\n"
        )
    cluster = SimulatedCluster(
        scenario, specs, controller, keep_spans=spans, check_every=check_every, record=record
    )
    cluster.run(progress)
    return _report(scenario, cluster)


def scenario_jobs(scenario: ClusterScenario) -> tuple[JobSpec, ...]:
    """The listed jobs and the drawn ones, by arrival."""
    drawn: tuple[JobSpec, ...] = ()
    if scenario.workload is not None:
        drawn = generate_jobs(scenario.workload, scenario.seed, scenario.lengths)
    return tuple(sorted((*scenario.jobs, *drawn), key=lambda spec: (spec.arrival_s, spec.job)))


def ordering_of(scenario: ClusterScenario) -> OrderingName:
    """The order of phases that a scenario's policy runs with."""
    ordering = scenario.policy.ordering
    if ordering == "auto":
        return ordering_for(scenario.policy.name)
    return ordering


def new_controller(scenario: ClusterScenario) -> CoScheduler:
    """A fresh co-scheduler with a scenario's policy."""
    fleet = scenario.view()
    chosen = scenario.policy
    guard = chosen.name in _GUARDED if chosen.guard == "auto" else chosen.guard == "yes"
    config = CoScheduleConfig(
        ordering=ordering_of(scenario),
        backfill=chosen.backfill,
        guard=guard,
        shrink_tails=scenario.tail.enabled,
        rebalance_every_s=chosen.regroup_every_s,
        slo_basis=chosen.slo_basis,
        switching=scenario.switching,
    )
    return CoScheduler(
        make_policy(chosen.name, fleet, chosen.options, scenario.seed), fleet, config
    )


def replay_run(lines: Iterable[bytes]) -> tuple[int, Divergence | None]:
    """Feed a recorded run to a fresh co-scheduler: how many events agreed, and the first that did
    not.
    """
    rest: Iterator[bytes] = iter(lines)
    try:
        header: Any = msgspec.json.decode(next(rest))
        scenario = decode(ClusterScenario, header["scenario"])
    except (StopIteration, msgspec.DecodeError, KeyError, TypeError):
        raise ConfigError(
            "record line 1: holds no scenario; use a file that --record wrote"
        ) from None
    return replay(new_controller(scenario), rest, EVENT_TYPES)


def _report(scenario: ClusterScenario, cluster: SimulatedCluster) -> RunReport:
    accounts = [execution.account for execution in cluster.executions.values()]
    admissions: dict[str, int] = {}
    for account in accounts:
        if account.strategy is not None:
            admissions[account.strategy] = admissions.get(account.strategy, 0) + 1
    fleet = cluster.account
    return RunReport(
        scenario=scenario.name,
        policy=scenario.policy.name,
        ordering=ordering_of(scenario),
        seed=scenario.seed,
        events=cluster.events,
        end_s=cluster.now_s,
        cost=fleet.cost,
        jobs=tuple(account.row(cluster.now_s) for account in accounts),
        refusals=tuple(cluster.refusals),
        admissions=admissions,
        rollout=fleet.use(Role.ROLLOUT),
        train=fleet.use(Role.TRAIN),
        switches=fleet.switches,
        moves=sum(account.moves for account in accounts),
        tail_migrations=cluster.tail_migrations,
        spans=tuple(fleet.spans),
        rentals=tuple(fleet.rentals),
        cost_steps=tuple(fleet.steps),
    )
