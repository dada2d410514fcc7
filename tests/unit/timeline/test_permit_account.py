"""Where the time of a shared run went, from its timeline."""

import pytest

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase
from slackwater.timeline.perfetto import trace_json
from slackwater.timeline.permit_account import Stretch, account, stretches, without_warm_up
from slackwater.timeline.spans import PermitSpans


def test_phases_waits_and_hand_overs_of_a_job_add_up_to_its_cycle() -> None:
    permits = []
    for cycle in range(5):
        at_s = 10.0 * cycle
        permits += [
            Stretch("a", "rollout", at_s, at_s + 4),
            Stretch("b", "train", at_s + 1, at_s + 5),
            Stretch("a", "train", at_s + 5.5, at_s + 9),  # 1 s for b, half a second for itself
            Stretch("b", "rollout", at_s + 5, at_s + 9),
        ]
    found = account(permits, ["a", "b"], 1)
    assert found is not None
    mine = found.jobs["a"]
    assert mine.rollout_s == pytest.approx(4)
    assert mine.train_s == pytest.approx(3.5)
    assert mine.train_wait_s == pytest.approx(1)
    assert mine.handover_s == pytest.approx(0.5)
    assert mine.sync_s == pytest.approx(1)
    assert mine.rollout_wait_s == pytest.approx(0)
    cycle_s = sum(mine.figures().values())
    assert cycle_s == pytest.approx(10)
    assert 0.7 < found.utilisation["rollout"] < 0.9


def test_the_parts_of_an_iteration_add_up_and_leave_out_what_was_trained_before_it() -> None:
    warm_up = [Stretch("a", "train", 0.0, 5.0), Stretch("a", "rollout", 5.0, 5.0)]
    cycles = []
    for at_s in (10.0, 20.0, 30.0):
        cycles += [
            Stretch("a", "rollout", at_s, at_s + 5),
            Stretch("a", "train", at_s + 6, at_s + 8),
        ]
    permits = without_warm_up([*warm_up, *cycles])
    assert permits == cycles
    found = account(permits, ["a"], 1)
    assert found is not None
    shares = found.jobs["a"].shares()
    assert shares == {"rollout": 0.5, "train": 0.2, "waits": 0.0, "hand_over": 0.3}
    assert account(permits[:2], ["a"], 1) is None  # too short to say


def test_the_trace_that_a_service_draws_is_read_back() -> None:
    node = NodeId("train-0")
    spans = PermitSpans((node,), 100.0)
    took = {"granted_ms": 0.4, "granted_own_ms": 0.3}
    spans.begin(1, JobId("a"), Phase.TRAIN, (node,), 101.0, took)
    spans.end(1, 103.0)
    trace = b"".join(trace_json(spans.timeline("live", "", 104.0)))
    assert stretches(trace) == [Stretch("a", "train", 1.0, 3.0, 0.4, 0.3)]
