"""The rental controller: how many nodes it rents, and that it stays within budgets."""

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from slackwater.control.coschedule.commands import RentNodes, ReturnNodes
from slackwater.control.rental import (
    InstancesLimited,
    NodeOffered,
    NodesNeeded,
    NodeWithdrawn,
    RentalAdopted,
    RentalCommand,
    RentalController,
    RentalTerms,
)
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, NodeId

JOB, OTHER = JobId("job"), JobId("other")


def offering(*names: str, terms: RentalTerms, now_s: float = 0.0) -> RentalController:
    controller = RentalController({"spot": terms})
    for name in names:
        controller.handle(NodeOffered(now_s, NodeId(name), "spot"))
    return controller


def rented(commands: Sequence[RentalCommand]) -> list[str]:
    return [n for command in commands if isinstance(command, RentNodes) for n in command.nodes]


def returned(commands: Sequence[RentalCommand]) -> list[str]:
    return [n for command in commands if isinstance(command, ReturnNodes) for n in command.nodes]


def test_as_many_are_rented_as_jobs_can_use_beside_what_is_here() -> None:
    controller = offering("a", "b", "c", "d", terms=RentalTerms(1.0))
    assert rented(controller.handle(InstancesLimited(1.0, JOB, 3, others=1))) == ["a", "b"]
    assert rented(controller.handle(InstancesLimited(2.0, OTHER, 1, others=1))) == ["c"]
    assert controller.handle(InstancesLimited(3.0, JOB, 1, others=1)) == []


def test_a_node_with_two_engines_counts_for_two() -> None:
    controller = offering("a", "b", "c", terms=RentalTerms(1.0, instances_per_node=2))
    assert rented(controller.handle(InstancesLimited(1.0, JOB, 3))) == ["a", "b"]


def test_the_cheapest_offer_comes_first() -> None:
    controller = RentalController({"dear": RentalTerms(9.0), "cheap": RentalTerms(1.0)})
    controller.handle(NodeOffered(0.0, NodeId("d"), "dear"))
    controller.handle(NodeOffered(0.0, NodeId("c"), "cheap"))
    assert rented(controller.handle(InstancesLimited(1.0, JOB, 1))) == ["c"]


def test_nodes_without_a_job_that_wants_them_are_returned_in_time() -> None:
    controller = offering("a", terms=RentalTerms(1.0, idle_s=100.0))
    commands = controller.handle(InstancesLimited(10.0, JOB, 1))
    (timer,) = [command for command in commands if isinstance(command, SetTimer)]
    assert timer.at_s == 110.0
    assert returned(controller.handle(TimerFired(109.0, timer.name))) == []
    assert returned(controller.handle(TimerFired(110.0, timer.name))) == ["a"]


def test_a_node_that_the_co_scheduler_needs_is_rented_and_kept() -> None:
    controller = offering("a", "b", terms=RentalTerms(1.0, idle_s=100.0))
    assert rented(controller.handle(NodesNeeded(1.0, (NodeId("b"),)))) == ["b"]
    assert returned(controller.handle(TimerFired(500.0, "rental"))) == []
    assert returned(controller.handle(NodesNeeded(501.0, ()))) == ["b"]


def test_a_node_that_was_taken_away_costs_no_more_and_another_is_rented() -> None:
    controller = offering("a", "b", terms=RentalTerms(3600.0, budget=10_000.0))
    controller.handle(InstancesLimited(0.0, JOB, 1))
    assert rented(controller.handle(NodeWithdrawn(10.0, NodeId("a")))) == ["b"]
    assert controller.cost_of("spot", 10.0) == 10.0
    assert controller.cost_of("spot", 11.0) == 11.0


def test_what_was_rented_before_a_restart_stays_until_jobs_have_said_what_they_want() -> None:
    controller = RentalController({"spot": RentalTerms(3600.0, 1e6, idle_s=100.0)}, {"spot": 5.0})
    controller.handle(NodeOffered(50.0, NodeId("a"), "spot"))
    assert returned(controller.handle(RentalAdopted(50.0, NodeId("a"), 20.0))) == []
    assert controller.cost_of("spot", 50.0) == 35.0
    assert returned(controller.handle(TimerFired(150.0, "rental"))) == ["a"]


STEPS = st.tuples(
    st.sampled_from(["offer", "withdraw", "limit", "need", "wait"]),
    st.integers(0, 5),
    st.floats(0.0, 400.0),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=60), st.floats(0.5, 50.0))
@example(
    [  # a node is returned when idle, and another one is rented while that one still costs
        ("offer", 0, 0.0),
        ("limit", 2, 0.0),
        ("offer", 1, 120.0),
        ("offer", 0, 80.0),
        ("limit", 1, 400.0),
        ("offer", 0, 241.0),
    ],
    8.0,
)
def test_no_sequence_of_events_costs_more_than_the_budget(
    steps: list[tuple[str, int, float]], budget: float
) -> None:
    """Whoever returns a node within a minute pays no more than the budget."""
    controller = RentalController({"spot": RentalTerms(20.0, budget, idle_s=600.0)})
    now_s, due_s = 0.0, float("inf")
    paid: dict[str, list[float]] = {}
    live: dict[str, float] = {}

    def happen(commands: Sequence[RentalCommand]) -> float:
        for name in returned(commands):
            paid.setdefault(name, []).append(now_s + 60.0 - live.pop(name))
        live.update(dict.fromkeys(rented(commands), now_s))
        timers = [command.at_s for command in commands if isinstance(command, SetTimer)]
        controller.check_integrity()
        return min(timers, default=float("inf"))

    for kind, number, seconds in steps:
        until_s = now_s + seconds
        while due_s <= until_s:
            now_s = due_s
            due_s = happen(controller.handle(TimerFired(now_s, "rental")))
        now_s, node = until_s, NodeId(str(number))
        match kind:
            case "offer" if str(number) not in live:
                due_s = happen(controller.handle(NodeOffered(now_s, node, "spot")))
            case "withdraw":
                if str(number) in live:
                    paid.setdefault(str(number), []).append(now_s - live.pop(str(number)))
                due_s = happen(controller.handle(NodeWithdrawn(now_s, node)))
            case "limit":
                due_s = happen(controller.handle(InstancesLimited(now_s, JOB, number)))
            case "need":
                due_s = happen(controller.handle(NodesNeeded(now_s, (node,))))
    seconds = sum(sum(each) for each in paid.values()) + sum(now_s - s for s in live.values())
    assert 20.0 * seconds / 3600 <= budget + 1e-6
