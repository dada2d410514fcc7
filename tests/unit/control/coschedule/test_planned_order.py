"""Fixed orders: everyone waits for their turn, and no cut of a plan can lock a group up."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import GroupPlan, Phase, PhaseSlot
from slackwater.policy.ordering.plan_alignment import PlanForecast, worst_period_s
from slackwater.policy.ordering.planned_order import PlannedOrder, RoundRobinOrder
from slackwater.policy.ordering.priority import LoadedJob, WaitingPhase
from slackwater.policy.ordering.round_robin_cycle import plan_round_robin

TRAIN = (NodeId("train-0"),)


def member(
    name: str,
    rollout_s: float,
    train_s: float,
    *,
    node: str = "rollout-0",
    next_phase: Phase = Phase.ROLLOUT,
    running_s: float = 0.0,
) -> LoadedJob:
    return LoadedJob(
        JobId(name), (NodeId(node),), TRAIN, rollout_s, train_s, 0.0, next_phase, running_s
    )


def wants(one: LoadedJob, phase: Phase) -> WaitingPhase:
    nodes = one.rollout_nodes if phase is Phase.ROLLOUT else one.train_nodes
    return WaitingPhase(one.job, phase, nodes, 0.0, 1.0, 0.0)


def test_a_job_does_not_run_twice_before_the_others_had_their_turn() -> None:
    a, b = member("a", 10, 10), member("b", 10, 10)
    order = RoundRobinOrder()
    order.adopt([a, b], None)
    rollouts = [wants(a, Phase.ROLLOUT), wants(b, Phase.ROLLOUT)]
    first = order.pick(rollouts, lambda _: True, 0.0)
    assert first is not None
    order.record_start(first.job, first.phase, first.nodes)
    assert order.pick([first], lambda _: True, 0.0) is None
    second = order.pick(rollouts, lambda _: True, 0.0)
    assert second is not None and second.job != first.job


def test_who_leaves_is_not_waited_for() -> None:
    a, b = member("a", 10, 10), member("b", 10, 10)
    order = RoundRobinOrder()
    order.adopt([a, b], None)
    first = order.pick([wants(a, Phase.ROLLOUT), wants(b, Phase.ROLLOUT)], lambda _: True, 0.0)
    assert first is not None
    order.record_start(first.job, first.phase, first.nodes)
    order.leave(b.job if first.job == a.job else a.job)
    assert order.pick([first], lambda _: True, 0.0) is not None


def test_a_plan_may_give_a_short_job_two_turns_in_a_long_ones_cycle() -> None:
    long, short = member("long", 50, 50), member("short", 25, 10, node="rollout-1")
    slots = (
        PhaseSlot(long.job, Phase.ROLLOUT, long.rollout_nodes, 0, 50),
        PhaseSlot(long.job, Phase.TRAIN, TRAIN, 50, 50),
        PhaseSlot(short.job, Phase.ROLLOUT, short.rollout_nodes, 0, 25),
        PhaseSlot(short.job, Phase.TRAIN, TRAIN, 25, 10),
        PhaseSlot(short.job, Phase.ROLLOUT, short.rollout_nodes, 35, 25),
        PhaseSlot(short.job, Phase.TRAIN, TRAIN, 100, 10),
    )
    plan = GroupPlan(110, slots)
    order = PlannedOrder()
    order.adopt([long, short], plan)
    made = run_order(order, [long, short], rounds=20)
    assert abs(made[short.job] - 2 * made[long.job]) <= 2


def test_a_member_in_its_rollout_is_not_given_another_before_it_trains() -> None:
    busy = member("busy", 30, 30, next_phase=Phase.TRAIN, running_s=20)
    idle = member("idle", 30, 30)
    order = RoundRobinOrder()
    order.adopt([busy, idle], None)
    assert order.pick([wants(idle, Phase.ROLLOUT)], lambda _: True, 0.0) is not None


def run_order(order: PlannedOrder, members: list[LoadedJob], rounds: int) -> dict[JobId, int]:
    """Every phase takes no time: grant whatever may run, until the slowest made `rounds`
    iterations.
    """
    phase = {m.job: m.next_phase for m in members}
    made = dict.fromkeys(phase, 0)
    by_job = {m.job: m for m in members}
    while min(made.values()) < rounds:
        requests = [wants(by_job[j], phase[j]) for j in phase]
        picked = order.pick(requests, lambda _: True, 0.0)
        assert picked is not None, f"nobody may run: {phase}"
        order.record_start(picked.job, picked.phase, picked.nodes)
        if picked.phase is Phase.TRAIN:
            made[picked.job] += 1
            phase[picked.job] = Phase.ROLLOUT
        else:
            phase[picked.job] = Phase.TRAIN
    return made


lengths = st.floats(5, 500)
standing = st.tuples(
    lengths,
    lengths,
    st.integers(0, 2),
    st.sampled_from([Phase.ROLLOUT, Phase.TRAIN]),
    st.floats(0, 500),
)


@given(st.lists(standing, min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_however_members_stand_the_order_goes_on_for_ever(
    drawn: list[tuple[float, float, int, Phase, float]],
) -> None:
    members = [
        member(f"j{i}", roll, train, node=f"rollout-{node}", next_phase=phase, running_s=running)
        for i, (roll, train, node, phase, running) in enumerate(drawn)
    ]
    order = RoundRobinOrder()
    order.adopt(members, None)
    made = run_order(order, members, rounds=5)
    assert max(made.values()) - min(made.values()) <= 2


@given(st.lists(st.tuples(lengths, lengths, st.integers(0, 2)), min_size=1, max_size=6), st.data())
@settings(max_examples=100, deadline=None)
def test_lengths_below_the_worst_never_make_the_cycle_longer(
    drawn: list[tuple[float, float, int]], data: st.DataObject
) -> None:
    members = [
        member(f"j{i}", roll, train, node=f"rollout-{node}")
        for i, (roll, train, node) in enumerate(drawn)
    ]
    plan = plan_round_robin(members)
    worst = {
        (m.job, phase): length
        for m in members
        for phase, length in ((Phase.ROLLOUT, m.rollout_s), (Phase.TRAIN, m.train_s))
    }
    shorter = {key: length * data.draw(st.floats(0.05, 1)) for key, length in worst.items()}
    syncs = dict.fromkeys((m.job for m in members), 0.0)
    at_worst = worst_period_s(plan, worst, syncs)
    assert at_worst <= plan.period_s * (1 + 1e-6)
    assert worst_period_s(plan, shorter, syncs) <= at_worst * (1 + 1e-9)


def test_a_plan_is_taken_up_where_it_costs_least() -> None:
    """The trainer is at b's train phase: beginning with a's rollout costs nobody anything."""
    a = member("a", 60, 40)
    b = member("b", 40, 60, next_phase=Phase.ROLLOUT, running_s=60)
    plan = plan_round_robin([a, b])
    forecast = PlanForecast(plan, [a, b])
    taken = forecast.align([a, b])
    assert taken.slots[0].job == a.job and taken.slots[0].phase is Phase.ROLLOUT
    assert forecast.loss_s([a, b]) == 0


def test_every_cut_keeps_all_slots() -> None:
    members = [member("a", 10, 20), member("b", 30, 10, next_phase=Phase.TRAIN)]
    plan = plan_round_robin(members)
    taken = PlanForecast(plan, members).align(members)
    assert sorted(map(repr, taken.slots)) == sorted(map(repr, plan.slots))
    assert len(list(itertools.compress(taken.slots, taken.skip_first))) <= len(members)
