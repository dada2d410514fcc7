"""A plan places what fits, in the cheapest of several orders, and says what it saves."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.model.errors import RefusedError
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.policy.placement.fleet import FleetView
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.planning.figures import plan_figures
from slackwater.sim.planning.sharing_plan import MeasuredPlan, candidate_plans, plan_sharing


def fleet(nodes: int = 64) -> FleetView:
    return FleetView(Pool(Role.ROLLOUT, H20, nodes), Pool(Role.TRAIN, H800, nodes))


def job(name: str, rollout_s: float, train_s: float, slo: float) -> JobSpec:
    return JobSpec(JobId(name), 0.0, 10, slo, JobProfile(rollout_s, train_s))


def backlog(*jobs: JobSpec, policy: str = "group", nodes: int = 64) -> ClusterScenario:
    pools = (fleet(nodes).rollout, fleet(nodes).train)
    return ClusterScenario("plan", pools, jobs, policy=PolicyConfig(name=policy))


def test_two_complementary_jobs_share_and_pay_half() -> None:
    measured = plan_sharing(backlog(job("a", 100, 100, 1.1), job("b", 100, 100, 1.1)))
    plan = measured.plan
    assert plan.alone_price_per_h == 2 * fleet().price_per_h(1, 1)
    assert plan.price_per_h == fleet().price_per_h(1, 1)
    assert [len(members) for members in plan.groups().values()] == [2]
    assert measured.work_per_dollar() == pytest.approx(2.0, rel=0.02)


def test_what_does_not_fit_now_is_turned_away_with_a_reason_and_costs_nothing() -> None:
    jobs = [job("a", 100, 100, 1.0), job("b", 90, 110, 1.0), job("c", 500, 500, 1.0)]
    plan = plan_sharing(backlog(*jobs, policy="solo", nodes=1)).plan
    assert len(plan.placed) == 1
    assert len(plan.turned_away) == 2
    assert all(away.reason and not away.for_good for away in plan.turned_away)
    assert plan.alone_price_per_h == fleet().price_per_h(1, 1)


def test_a_fleet_on_which_nothing_fits_is_told_so() -> None:
    needs_two = dataclasses.replace(job("a", 100, 100, 1.0).profile, train_nodes=2)
    large = dataclasses.replace(job("a", 100, 100, 1.0), profile=needs_two)
    with pytest.raises(RefusedError, match=r"no job can be placed: a: .*2 train nodes"):
        plan_sharing(backlog(large, nodes=1))


drawn_jobs = st.lists(
    st.tuples(st.floats(25, 600), st.floats(25, 600), st.floats(1, 2)), min_size=1, max_size=6
)


@settings(max_examples=20, deadline=None)
@given(drawn_jobs)
def test_a_plan_places_everyone_and_is_never_dearer_than_each_alone(
    drawn: list[tuple[float, float, float]],
) -> None:
    specs = [job(str(number), *values) for number, values in enumerate(drawn)]
    for plan in candidate_plans(backlog(*specs)):
        assert plan.price_per_h <= plan.alone_price_per_h + 1e-9
        assert {spec.job for spec in plan.placed} == {spec.job for spec in specs}


@pytest.mark.parametrize("policy", ["group", "ours"])
@settings(max_examples=8, deadline=None)
@given(drawn=drawn_jobs)
def test_a_run_of_the_plan_pays_its_price_and_keeps_every_slo(
    policy: str, drawn: list[tuple[float, float, float]]
) -> None:
    jobs = (job(str(number), *values) for number, values in enumerate(drawn))
    scenario = backlog(*jobs, policy=policy)
    measured = plan_sharing(scenario)
    figures = plan_figures(measured, fleet())
    price = measured.plan.price_per_h
    settled = [step.price_per_h for step in measured.report.cost_steps if step.at_s < 1]
    assert settled[-1] == pytest.approx(price)
    assert sum(group["price_per_h"] for group in figures["groups"]) == pytest.approx(price)
    assert figures["slo_attainment"] == 1.0


def test_of_several_plans_the_one_that_works_most_for_a_dollar_is_kept() -> None:
    lengths = [(130, 110, 1.3), (260, 220, 1.5), (90, 80, 2.0), (180, 150, 1.6), (420, 120, 1.4)]
    lengths += [(600, 160, 1.6), (380, 100, 1.3), (300, 280, 1.5)]
    jobs = (job(str(number), *values) for number, values in enumerate(lengths))
    scenario = backlog(*jobs, policy="ours")
    plans = candidate_plans(scenario)
    assert len(plans) > 1
    each = [
        MeasuredPlan(plan, simulate(dataclasses.replace(scenario, jobs=plan.placed), spans=True))
        for plan in plans
    ]
    best = max(one.work_per_dollar() for one in each)
    assert best > min(one.work_per_dollar() for one in each)
    assert plan_sharing(scenario).work_per_dollar() == best


def test_the_slowdown_of_a_job_alone_is_one() -> None:
    scenario = backlog(job("a", 100, 80, 1.5), job("b", 300, 40, 1.5), policy="solo")
    assert plan_sharing(scenario).iteration_s() == {
        "a": pytest.approx(180, rel=0.01),  # a state that stays on its devices saves the warm load
        "b": pytest.approx(340, rel=0.01),
    }
