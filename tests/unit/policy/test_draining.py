"""On a fleet that is paid for anyway, time is saved and not rent: nobody is slowed beyond the end
of the last job.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_cases import drawn_jobs, job

from slackwater.model.ids import JobId
from slackwater.model.job import JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.model.placement import Placement, Refusal
from slackwater.policy.placement.catalogue import make_policy
from slackwater.policy.placement.consolidation import MIN_MOVE_GAP_S
from slackwater.policy.placement.draining import admission_order, estimate_drain, solo_duration_s
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.interface import JobProgress, PlacementPolicy
from slackwater.policy.placement.rented_nodes import RentedNodes


def fleet(train: int, *, owned: bool = True) -> FleetView:
    return FleetView(
        Pool(Role.ROLLOUT, H20, 64, owned=owned), Pool(Role.TRAIN, H800, train, owned=owned)
    )


def fresh(spec: JobSpec) -> JobProgress:
    """A job that has not begun: its SLO leaves it all its time."""
    return JobProgress(spec.job, spec.iterations, spec.slo * solo_duration_s(spec))


def arrive(
    policy: PlacementPolicy,
    spec: JobSpec,
    *,
    placed: Sequence[JobSpec] = (),
    waiting: Sequence[JobSpec] = (),
) -> Placement | Refusal:
    """As the co-scheduler asks; nobody placed has made progress."""
    policy.observe([fresh(other) for other in placed], (*waiting, spec))
    answer = policy.place(spec, 0.0)
    policy.check_integrity()
    return answer


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 16))
def test_the_bound_leaves_every_job_the_time_it_takes_alone_and_the_fleet_its_work(
    seed: int, count: int, nodes: int
) -> None:
    jobs = drawn_jobs(seed, count)
    placed = [(spec.iterations, spec.profile) for spec in jobs[::2]]
    bound = estimate_drain(placed, jobs[1::2], nodes)
    assert bound.bound_s >= max(solo_duration_s(spec) for spec in jobs)
    work_s = sum(s.iterations * s.profile.train_s * s.profile.train_nodes for s in jobs)
    assert bound.bound_s * nodes >= work_s
    assert bound.critical_job in {None, *(spec.job for spec in jobs[1::2])}


def test_without_jobs_nothing_bounds_and_nobody_is_awaited() -> None:
    bound = estimate_drain((), (), 4)
    assert (bound.bound_s, bound.critical_job) == (0.0, None)


def test_a_waiting_job_is_awaited_if_it_ends_last_and_the_amount_of_work_does_not_decide() -> None:
    long = replace(job("long", 100, 10), iterations=1000)
    short = replace(job("short", 100, 100), iterations=10)
    assert estimate_drain([(10, short.profile)], [short, long], 4).critical_job == "long"
    assert estimate_drain([(1000, long.profile)], [short], 4).critical_job is None
    busy = [(400, short.profile)] * 20
    assert estimate_drain(busy, [long], 4).critical_job is None


def test_who_might_end_last_is_tried_first_and_then_the_shortest() -> None:
    hour, day, two_days = (
        replace(job(name, 100, 80), iterations=20 * hours)
        for name, hours in (("hour", 1), ("day", 24), ("two_days", 48))
    )
    waiting = [hour, two_days, day]
    for bound_days, order in (
        (1, ["two_days", "day", "hour"]),
        (3, ["two_days", "hour", "day"]),
        (5, ["hour", "day", "two_days"]),
    ):
        assert admission_order(waiting, bound_days * 86_400.0) == order


@given(st.integers(0, 10_000), st.integers(1, 30), st.floats(0.0, 1e7))
def test_nobody_is_passed_over_for_ever(seed: int, count: int, bound_s: float) -> None:
    waiting = drawn_jobs(seed, count)
    order = admission_order(waiting, bound_s)
    assert sorted(order) == sorted(spec.job for spec in waiting)
    soon = replace(job("soon", 1, 1), arrival_s=0.0)
    for spec in waiting:
        late_s = 11 * solo_duration_s(spec) + spec.arrival_s
        later = replace(soon, arrival_s=late_s)
        assert admission_order([later, spec], bound_s)[0] == spec.job


@pytest.mark.parametrize("owned", [True, False])
def test_free_nodes_are_used_on_an_owned_fleet_and_saved_on_a_rented_one(owned: bool) -> None:
    policy = make_policy("ours", fleet(4, owned=owned))
    specs = [job(name, 100, 100, slo=2.0) for name in "ab"]
    for spec in specs:
        assert isinstance(arrive(policy, spec), Placement)
    policy.observe([fresh(spec) for spec in specs])
    policy.rebalance(0.0)
    trained_on = [node for node in policy.list_rented() if node.startswith("train")]
    assert len(trained_on) == (2 if owned else 1)


def test_the_job_that_ends_last_is_not_slowed_for_others() -> None:
    """Both bounds are wide, and on a rented node they share; on an owned one that would put off the
    end.
    """
    long = replace(job("long", 100, 100, slo=2.0), iterations=400)
    short = replace(job("short", 100, 150, slo=2.0), iterations=100)
    for owned in (True, False):
        policy = make_policy("ours", fleet(1, owned=owned))
        arrive(policy, long)
        answer = arrive(policy, short, placed=[long])
        assert isinstance(answer, Refusal if owned else Placement)


def test_a_job_that_ends_long_before_the_last_may_be_slowed() -> None:
    policy = make_policy("ours", fleet(1))
    arrive(policy, replace(job("long", 300, 100, slo=1.2), iterations=400))
    placed = arrive(policy, replace(job("short", 100, 150, slo=2.0), iterations=20))
    assert isinstance(placed, Placement)
    assert placed.plan is not None
    worst_s = placed.plan.period_s / placed.plan.rounds(JobId("long"))
    assert worst_s <= 1.03 * 400
    assert placed.plan.period_s / placed.plan.rounds(JobId("short")) > 250


def test_while_the_job_that_would_end_last_waits_others_are_told_for_whom_they_wait() -> None:
    policy = make_policy("ours", fleet(2))
    arrive(policy, replace(job("first", 100, 60, slo=1.1), iterations=20))
    wide = replace(job("wide", 100, 20, slo=1.0, train_nodes=2), iterations=2000)
    assert isinstance(arrive(policy, wide), Refusal)
    small = replace(job("small", 100, 10, slo=2.0), iterations=5)
    answer = arrive(policy, small, waiting=[wide])
    assert isinstance(answer, Refusal)
    assert "kept for wide" in answer.reason
    policy.observe((), ())
    policy.remove(JobId("first"))
    assert isinstance(arrive(policy, wide, waiting=[small]), Placement)


def test_jobs_are_only_brought_together_on_an_owned_fleet_if_someone_waits() -> None:
    specs = [replace(job(name, 100, 20, slo=2.0), iterations=200) for name in "ab"]
    policy = make_policy("ours", fleet(2))
    for spec in specs:
        arrive(policy, spec)
    progress = [fresh(spec) for spec in specs]
    policy.observe(progress, ())
    assert not policy.rebalance(0.0)
    policy.observe(progress, [replace(job("c", 100, 20, slo=1.0), iterations=100)])
    assert policy.rebalance(MIN_MOVE_GAP_S)


def test_a_node_of_an_owned_pool_is_worth_more_the_fewer_are_left() -> None:
    owned, rented = RentedNodes(fleet(4)), RentedNodes(fleet(4, owned=False))
    worth = []
    for _ in range(4):
        owned.rent(Role.TRAIN, 1)
        rented.rent(Role.TRAIN, 1)
        worth.append(owned.worth_per_h(Role.TRAIN) / H800.price_per_h)
        assert rented.worth_per_h(Role.TRAIN) == H800.price_per_h
    assert worth == [0.25, 0.5, 0.75, 1.0]
