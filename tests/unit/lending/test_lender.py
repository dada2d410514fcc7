"""Which serving nodes lend to whom, under any order of events."""

from collections.abc import Sequence

import numpy as np
import pytest

from slackwater.control.lending import commands as do
from slackwater.control.lending import events as on
from slackwater.control.lending.lender import Lender, LenderSettings
from slackwater.control.record import record_line, replay
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.errors import ConfigError
from slackwater.model.ids import JobId, NodeId, ServiceName
from slackwater.policy.serving.lender_choice import LenderRule

CHAT, CODE = ServiceName("chat"), ServiceName("code")
ONE, TWO = JobId("one"), JobId("two")


class Stage:
    """A lender and the nodes that it has heard of."""

    def __init__(self, nodes: int = 4, most_nodes: int = 4) -> None:
        self.lender = Lender()
        self.now_s = 0.0
        self.tell(on.ServiceOpened(0.0, CHAT, most_nodes))
        for number in range(nodes):
            self.tell(on.ServingNodeJoined(0.0, NodeId(f"n{number}"), CHAT))
            self.report(number, 0.1 * number)

    def tell(self, event: on.LendingEvent) -> Sequence[do.LendingCommand]:
        commands = self.lender.handle(event)
        self.lender.check_integrity()
        return [command for command in commands if not isinstance(command, SetTimer)]

    def report(
        self, number: int, kv_share: float, busy_share: float = 0.2
    ) -> Sequence[do.LendingCommand]:
        event = on.ServingNodeReported(self.now_s, NodeId(f"n{number}"), kv_share, busy_share)
        return self.tell(event)


def test_the_emptiest_nodes_lend_first_and_one_job_each() -> None:
    stage = Stage()
    assert stage.tell(on.CapacityWanted(1.0, ONE, 2)) == [
        do.LendNode(NodeId("n0"), ONE),
        do.LendNode(NodeId("n1"), ONE),
    ]
    assert stage.tell(on.CapacityWanted(1.0, TWO, 4)) == [
        do.LendNode(NodeId("n2"), TWO),
        do.LendNode(NodeId("n3"), TWO),
    ]


def test_a_jobs_next_step_sets_the_budgets_of_its_own_nodes_anew() -> None:
    stage = Stage()
    stage.tell(on.CapacityWanted(1.0, ONE, 1))
    stage.tell(on.CapacityWanted(1.0, TWO, 1))
    assert stage.tell(on.BorrowerStepBegan(2.0, TWO)) == [do.BeginStep(NodeId("n1"), TWO)]
    stage.tell(on.CapacityReturned(3.0, TWO))
    assert stage.tell(on.BorrowerStepBegan(4.0, TWO)) == []


def test_a_loan_that_its_job_does_not_use_ends_and_each_further_one_comes_later() -> None:
    stage, rule = Stage(nodes=1), LenderRule()
    node = NodeId("n0")

    def reported(now_s: float, use: float) -> Sequence[do.LendingCommand]:
        return stage.tell(on.ServingNodeReported(now_s, node, 0.1, 0.2, rollout_share=use))

    def reviewed(now_s: float) -> Sequence[do.LendingCommand]:
        return stage.tell(TimerFired(now_s, "lender-review"))

    stage.tell(on.CapacityWanted(1.0, ONE, 1))
    assert reported(5.0, 0.3) == []
    assert reported(5.0 + rule.trial_s, 0.0) == []
    ended_s = 5.5 + rule.trial_s
    (taken,) = reported(ended_s, 0.0)
    assert isinstance(taken, do.ReclaimNode)
    assert "used less than 1%" in taken.reason
    stage.tell(on.NodeCleared(ended_s, node))
    assert reviewed(ended_s + rule.rest_s - 1.0) == []
    lent_s = ended_s + rule.rest_s
    assert reviewed(lent_s) == [do.LendNode(node, ONE)]
    ended_s = lent_s + rule.trial_s + 0.5
    assert len(reported(ended_s, 0.0)) == 1
    stage.tell(on.NodeCleared(ended_s, node))
    assert reviewed(ended_s + rule.rest_s) == []
    assert reviewed(ended_s + rule.rest_duration_s(1)) == [do.LendNode(node, ONE)]
    assert rule.rest_duration_s(50) == rule.longest_rest_s


def test_a_service_lends_no_more_nodes_than_it_allows() -> None:
    stage = Stage(most_nodes=1)
    assert len(stage.tell(on.CapacityWanted(1.0, ONE, 4))) == 1
    (taken,) = stage.tell(on.ServiceOpened(2.0, CHAT, 0))
    assert isinstance(taken, do.ReclaimNode)


def test_a_node_whose_service_misses_its_slo_is_reclaimed_and_lends_when_it_meets_it() -> None:
    stage = Stage(nodes=1)
    stage.tell(on.CapacityWanted(1.0, ONE, 1))
    node = NodeId("n0")
    (taken,) = stage.tell(on.ServingNodeReported(2.0, node, 0.1, 0.2, meets_slo=False))
    why = "its service misses its SLO, or would with rollouts beside it"
    assert taken == do.ReclaimNode(node, ONE, why)
    stage.tell(on.NodeCleared(2.5, node))
    for now_s in (3.0, 40.0, 70.0):
        late = on.ServingNodeReported(now_s, node, 0.1, 0.2, meets_slo=False)
        assert stage.tell(late) == [], "it has rested, and still misses it"
    assert stage.tell(on.ServingNodeReported(71.0, node, 0.1, 0.2)) == [do.LendNode(node, ONE)]


def test_a_node_whose_service_needs_it_is_taken_back_at_once_and_rests() -> None:
    stage = Stage(nodes=1)
    stage.tell(on.CapacityWanted(1.0, ONE, 1))
    stage.now_s = 2.0
    (taken,) = stage.report(0, 0.85)
    assert taken == do.ReclaimNode(NodeId("n0"), ONE, taken.reason)  # type: ignore[union-attr]
    stage.tell(on.NodeCleared(2.5, NodeId("n0")))
    stage.now_s = 10.0
    assert stage.report(0, 0.1) == [], "it rests, and the window still holds the burst"
    stage.now_s = 70.0
    assert stage.report(0, 0.1) == [do.LendNode(NodeId("n0"), ONE)]


def test_a_second_full_of_prompts_ends_no_loan_and_a_minute_of_them_does() -> None:
    stage, window_s = Stage(nodes=1), int(LenderSettings().window_s)
    stage.tell(on.CapacityWanted(1.0, ONE, 1))
    for second in range(2, 2 + window_s):
        stage.now_s = float(second)
        assert stage.report(0, 0.1, 1.0 if second % 2 else 0.5) == []
    full: list[do.LendingCommand] = []
    for second in range(2 + window_s, 2 + 2 * window_s):
        stage.now_s = float(second)
        full += stage.report(0, 0.1, 1.0)
    (taken,) = full
    assert isinstance(taken, do.ReclaimNode) and "of the time" in taken.reason


def test_a_node_is_not_lent_again_before_it_is_clear() -> None:
    stage = Stage(nodes=1)
    stage.tell(on.CapacityWanted(1.0, ONE, 1))
    stage.tell(on.CapacityReturned(2.0, ONE))
    assert stage.tell(on.CapacityWanted(3.0, TWO, 1)) == []
    assert stage.tell(on.NodeCleared(4.0, NodeId("n0"))) == [do.LendNode(NodeId("n0"), TWO)]


def test_a_service_that_stops_lending_gets_everything_back() -> None:
    stage = Stage()
    stage.tell(on.CapacityWanted(1.0, ONE, 3))
    taken = stage.tell(on.LendingStopped(2.0, CHAT, "its SLO cannot be met"))
    assert len(taken) == 3
    assert stage.tell(on.CapacityWanted(3.0, TWO, 3)) == []


def test_nodes_of_which_nothing_was_heard_do_not_lend() -> None:
    stage = Stage(nodes=0)
    stage.tell(on.ServingNodeJoined(0.0, NodeId("new"), CHAT))
    assert stage.tell(on.CapacityWanted(1.0, ONE, 1)) == []


def test_a_loan_that_failed_is_not_tried_again_at_once() -> None:
    stage = Stage(nodes=1)
    stage.tell(on.CapacityWanted(1.0, ONE, 1))
    assert stage.tell(on.LoanFailed(2.0, NodeId("n0"), "the models do not fit")) == []
    assert stage.tell(TimerFired(20.0, "lender-review")) == []
    assert stage.tell(TimerFired(33.0, "lender-review")) == [do.LendNode(NodeId("n0"), ONE)]


def test_a_rule_that_takes_back_before_it_lends_is_refused() -> None:
    with pytest.raises(ConfigError, match="most_kv, back_kv"):
        LenderRule(most_kv=0.9, back_kv=0.5)


@pytest.mark.parametrize("seed", range(20))
def test_in_a_storm_no_node_has_two_borrowers_and_the_record_replays(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lines: list[bytes] = []
    lender = Lender(LenderSettings(window_s=10.0))
    borrower: dict[NodeId, JobId] = {}
    leaving: set[NodeId] = set()
    now_s = 0.0
    for service in (CHAT, CODE):
        opened = on.ServiceOpened(now_s, service, 3)
        lines.append(record_line(opened, lender.handle(opened)))
    for _ in range(400):
        now_s += float(rng.exponential(1.0))
        event = _random_event(rng, now_s, leaving)
        commands = lender.handle(event)
        lines.append(record_line(event, commands))
        for command in commands:
            match command:
                case do.LendNode(node, job):
                    assert node not in borrower and node not in leaving
                    borrower[node] = job
                case do.ReclaimNode(node, job):
                    assert borrower.pop(node) == job
                    leaving.add(node)
        lender.check_integrity()
        known = lender.loans()
        borrower = {node: job for node, job in borrower.items() if node in known}
        assert known == borrower
    agreed, divergence = replay(Lender(LenderSettings(window_s=10.0)), lines, on.EVENT_TYPES)
    assert divergence is None and agreed == len(lines)


def _random_event(rng: np.random.Generator, now_s: float, leaving: set[NodeId]) -> on.LendingEvent:
    number = int(rng.integers(8))
    node, service = NodeId(f"n{number}"), (CHAT, CODE)[number % 2]
    job = (ONE, TWO)[int(rng.integers(2))]
    kind = int(rng.choice(10, p=[0.04, 0.02, 0.14, 0.4, 0.04, 0.12, 0.06, 0.1, 0.04, 0.04]))
    match kind:
        case 0:
            return on.ServiceOpened(now_s, service, int(rng.integers(4)))
        case 1:
            return on.LendingStopped(now_s, service, "asked")
        case 2:
            return on.ServingNodeJoined(now_s, node, service)
        case 3:
            shares = rng.random(2).tolist()
            kept = bool(rng.random() < 0.9)
            return on.ServingNodeReported(now_s, node, shares[0], shares[1], kept)
        case 4:
            leaving.discard(node)
            return on.ServingNodeLost(now_s, node)
        case 5:
            return on.CapacityWanted(now_s, job, int(rng.integers(6)))
        case 6:
            return on.CapacityReturned(now_s, job)
        case 7:
            leaving.discard(node)
            return on.NodeCleared(now_s, node)
        case 8:
            leaving.discard(node)
            return on.LoanFailed(now_s, node, "it did not fit")
        case _:
            return TimerFired(now_s, "lender-review")
