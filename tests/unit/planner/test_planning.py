"""A plan places what fits, in the cheapest of several orders, and says what it saves."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.model.placement import Placement
from slackwater.policy.catalogue import make_policy
from slackwater.policy.fleet import Fleet
from slackwater.sim.planning import measured_jobs, plan_sharing


def fleet(nodes: int = 64) -> Fleet:
    return Fleet(Pool(Role.ROLLOUT, H20, nodes), Pool(Role.TRAIN, H800, nodes))


def job(name: str, rollout_s: float, train_s: float, slo: float) -> JobSpec:
    return JobSpec(JobId(name), 0.0, 10, slo, JobProfile(rollout_s, train_s))


def test_two_complementary_jobs_share_and_pay_half() -> None:
    plan = plan_sharing([job("a", 100, 100, 1.1), job("b", 100, 100, 1.1)], fleet(), "group", {})
    assert plan.alone_price_per_h == 2 * fleet().price_per_h(1, 1)
    assert plan.price_per_h == fleet().price_per_h(1, 1)
    assert [len(members) for members in plan.groups().values()] == [2]


def test_what_does_not_fit_now_is_turned_away_with_a_reason_and_costs_nothing() -> None:
    plan = plan_sharing(
        [job("a", 100, 100, 1.0), job("b", 90, 110, 1.0), job("c", 500, 500, 1.0)],
        fleet(nodes=1),
        "solo",
        {},
    )
    assert len(plan.placed) == 1
    assert len(plan.refusals) == 2
    assert all(refusal.reason for refusal in plan.refusals)
    assert plan.alone_price_per_h == fleet().price_per_h(1, 1)


jobs = st.lists(
    st.tuples(st.floats(25, 600), st.floats(25, 600), st.floats(1, 2)), min_size=1, max_size=7
)


@settings(max_examples=30, deadline=None)
@given(jobs)
def test_the_plan_is_never_dearer_than_taking_jobs_as_they_come_or_each_alone(
    drawn: list[tuple[float, float, float]],
) -> None:
    specs = [job(str(number), *values) for number, values in enumerate(drawn)]
    plan = plan_sharing(specs, fleet(), "group", {})
    policy = make_policy("group", fleet())
    for spec in specs:
        assert isinstance(policy.place(spec, 0.0), Placement)
    assert plan.price_per_h <= policy.hourly_cost()
    assert plan.price_per_h <= plan.alone_price_per_h
    assert {spec.job for spec in plan.placed} == {spec.job for spec in specs}


def test_jobs_to_be_measured_run_about_equally_long() -> None:
    plan = plan_sharing([job("a", 100, 100, 1.5), job("b", 400, 300, 1.5)], fleet(), "group", {})
    lengths = [spec.iterations * spec.profile.solo_s for spec in measured_jobs(plan)]
    assert max(lengths) / min(lengths) < 1.1
    assert replace(measured_jobs(plan)[0], iterations=10) in plan.order
