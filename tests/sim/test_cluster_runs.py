"""Whole simulated runs: the SLO holds, accounts add up, records replay, faults lose nothing."""

import dataclasses
import itertools
from collections import defaultdict
from typing import Any, Literal

import msgspec
import pytest

from slackwater.model.errors import ConfigError
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.sim.cluster.report import RunReport
from slackwater.sim.cluster.scenario import (
    ClusterScenario,
    DriftConfig,
    FaultConfig,
    LengthConfig,
    PolicyConfig,
    TailConfig,
)
from slackwater.sim.cluster.simulate import replay_run, scenario_jobs, simulate
from slackwater.sim.cluster.workload import CycleWorkload, ProductionWorkload, ProfileWorkload
from slackwater.timeline.spans import Span

POLICIES = ("ours", "group", "solo", "colocated")


def production(policy: str, seed: int = 0, **changes: Any) -> ClusterScenario:
    scenario = ClusterScenario(
        workload=ProductionWorkload(jobs=14, span_s=86400.0, mean_duration_s=8 * 3600.0),
        lengths=LengthConfig(kind="long_tail"),
        policy=PolicyConfig(name=policy),
        seed=seed,
    )
    return dataclasses.replace(scenario, **changes)


def profiles(policy: str, seed: int = 0, jobs: int = 25) -> ClusterScenario:
    return ClusterScenario(
        workload=ProfileWorkload(jobs=jobs, span_s=36 * 3600.0, mean_duration_s=6 * 3600.0),
        policy=PolicyConfig(name=policy),
        seed=seed,
    )


@pytest.mark.parametrize("policy", ["ours", "group"])
@pytest.mark.parametrize("seed", range(3))
def test_every_admitted_job_keeps_its_slo_when_every_phase_takes_its_worst(
    policy: str, seed: int
) -> None:
    report = simulate(profiles(policy, seed), check_every=50)
    assert report.finished == len(report.jobs)
    missed = [
        (row.job, row.slo, row.elapsed_s / row.bound_s) for row in report.jobs if not row.kept_slo
    ]
    assert missed == []


@pytest.mark.parametrize("seed", [1, 3, 4, 10, 13])
def test_short_jobs_with_tight_slos_keep_them_though_others_come_and_go(seed: int) -> None:
    """One cycle lost when a newcomer joins is a tenth of such a job's life."""
    workload = ProfileWorkload(
        mix="rollout_heavy",
        jobs=30,
        span_s=24 * 3600.0,
        mean_duration_s=1.5 * 3600,
        slo_low=1.0,
        slo_high=1.5,
    )
    for policy in ("group", "ours"):
        scenario = ClusterScenario(workload=workload, policy=PolicyConfig(name=policy), seed=seed)
        assert simulate(scenario).slo_attainment == 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_admitted_job_keeps_its_slo_with_long_tailed_lengths(policy: str) -> None:
    report = simulate(production(policy), check_every=50)
    assert report.finished == len(report.jobs)
    assert report.slo_attainment == 1.0


def test_sharing_costs_less_than_running_alone_and_ours_less_than_groups() -> None:
    cost = {
        policy: simulate(profiles(policy, jobs=40)).cost for policy in ("solo", "group", "ours")
    }
    assert cost["ours"] < cost["group"] < cost["solo"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["ours", "group"])
def test_crashes_lost_nodes_and_doubled_messages_lose_no_iteration(policy: str, seed: int) -> None:
    faults = FaultConfig(
        job_crashes_per_h=1.0, node_losses_per_h=0.3, repair_s=900, doubled_message_share=0.05
    )
    report = simulate(production(policy, seed, faults=faults), check_every=1)
    assert sum(row.crashes for row in report.jobs) > 3
    for row in report.jobs:
        assert row.finished_s is not None and row.iterations_done == row.iterations


def test_the_same_scenario_gives_the_same_run() -> None:
    assert simulate(production("ours", 3)) == simulate(production("ours", 3))


def test_another_seed_gives_other_jobs() -> None:
    assert scenario_jobs(production("ours", 1)) != scenario_jobs(production("ours", 2))


def test_all_policies_see_the_same_lengths() -> None:
    alone = {policy: simulate(production(policy, 2)) for policy in ("solo", "group")}
    for one, other in zip(alone["solo"].jobs, alone["group"].jobs, strict=True):
        assert one.solo_realised_s == pytest.approx(other.solo_realised_s)


@pytest.mark.parametrize("policy", ["ours", "group"])
def test_replaying_a_record_gives_the_same_commands(policy: str) -> None:
    lines: list[bytes] = []
    faults = FaultConfig(job_crashes_per_h=0.5, node_losses_per_h=0.1, doubled_message_share=0.02)
    report = simulate(production(policy, 5, faults=faults), record=lines.append)
    agreed, divergence = replay_run(lines)
    assert divergence is None and agreed == report.events == len(lines) - 1


def test_a_record_that_was_changed_is_found_out_at_the_line() -> None:
    lines: list[bytes] = []
    simulate(production("group", 5), record=lines.append)
    number = next(i for i, line in enumerate(lines) if b"GrantPermit" in line)
    entry = msgspec.json.decode(lines[number])
    entry["commands"][-1]["body"]["permit"] += 1
    lines[number] = msgspec.json.encode(entry)
    agreed, divergence = replay_run(lines)
    assert divergence is not None and agreed == number - 1 and divergence.line == number


def test_a_file_that_is_no_record_is_refused() -> None:
    with pytest.raises(ConfigError, match="--record"):
        replay_run([b'{"event": {}}\n'])


def busy(spans: tuple[Span, ...]) -> dict[str, list[Span]]:
    by_node: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind != "tail":
            by_node[span.node].append(span)
    return by_node


@pytest.mark.parametrize("policy", POLICIES)
def test_no_node_runs_two_phases_at_once_and_none_unpaid(policy: str) -> None:
    report = simulate(production(policy, 1), spans=True)
    for node, spans in busy(report.spans).items():
        spans.sort(key=lambda span: (span.start_s, span.end_s))
        for before, after in itertools.pairwise(spans):
            assert before.end_s <= after.start_s + 1e-6, (node, before, after)
        rented = [rental for rental in report.rentals if rental.node == node]
        for span in spans:
            assert any(r.start_s <= span.start_s and span.end_s <= r.end_s + 1e-6 for r in rented)


def steps_cost(report: RunReport) -> float:
    pairs = itertools.pairwise(report.cost_steps)
    return sum((b.at_s - a.at_s) / 3600 * a.price_per_h for a, b in pairs)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_cost_is_the_price_of_the_rented_nodes_over_time(policy: str) -> None:
    report = simulate(production(policy, 1), spans=True)
    assert report.cost == pytest.approx(steps_cost(report))
    prices = {Role.ROLLOUT: H20.price_per_h, Role.TRAIN: H800.price_per_h}
    rent = sum(
        (r.end_s - r.start_s) / 3600 * prices[Role(r.node.partition("-")[0])]
        for r in report.rentals
    )
    assert report.cost == pytest.approx(rent)
    assert report.cost_steps[-1].price_per_h == 0


def test_a_job_alone_takes_just_its_own_time() -> None:
    report = simulate(production("solo", 4))
    for row in report.jobs:
        assert row.slowdown_realised == pytest.approx(1.0)


def test_moving_the_tail_aside_lets_sharing_jobs_finish_sooner() -> None:
    base = production("group", 2)
    with_tail = simulate(base)
    without = simulate(dataclasses.replace(base, tail=TailConfig(enabled=False)))
    assert with_tail.tail_migrations > 0 and without.tail_migrations == 0
    spent = [sum(row.elapsed_s for row in report.jobs) for report in (with_tail, without)]
    assert spent[0] < spent[1]


def test_a_fleet_that_is_too_small_queues_jobs_and_still_finishes_them() -> None:
    fleet = (Pool(Role.ROLLOUT, H20, 64), Pool(Role.TRAIN, H800, 4))
    workload = CycleWorkload(jobs=12, span_s=3600.0, mean_iterations=20)
    ends = {}
    for policy in ("solo", "ours"):
        scenario = ClusterScenario(
            fleet=fleet, workload=workload, policy=PolicyConfig(name=policy), seed=1
        )
        report = simulate(scenario)
        assert report.finished == 12 and max(row.queued_s for row in report.jobs) > 0
        assert report.train.peak_nodes <= 4
        ends[policy] = report.end_s
    assert ends["ours"] < ends["solo"]


@pytest.mark.parametrize("setting", ["increasing", "decreasing", "mixed"])
def test_drift_is_borne(setting: Any) -> None:
    drift = DriftConfig(setting=setting)
    bases: tuple[Literal["declared", "realised"], ...] = ("declared", "realised")
    for basis in bases:
        policy = PolicyConfig(name="ours", slo_basis=basis)
        scenario = dataclasses.replace(production("ours", 1, drift=drift), policy=policy)
        report = simulate(scenario, check_every=25)
        assert report.finished == len(report.jobs)
        if basis == "declared":
            assert report.slo_attainment == 1.0
        else:
            assert sum(not row.kept_slo_realised for row in report.jobs) <= 1


@pytest.mark.parametrize("ordering", ["hrrs", "fcfs"])
def test_orders_by_priority_starve_no_one(ordering: Any) -> None:
    policy = PolicyConfig(name="group", ordering=ordering)
    scenario = dataclasses.replace(production("group", 1), policy=policy)
    report = simulate(scenario, check_every=25)
    assert report.finished == len(report.jobs)
