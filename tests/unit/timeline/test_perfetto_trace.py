"""A run's trace has every phase on its node's track, and is whole JSON."""

import json
from typing import Any

from handmade_reports import two_jobs_taking_turns

from slackwater.model.ids import NodeId
from slackwater.timeline.perfetto import node_order, trace_json


def events() -> list[dict[str, Any]]:
    whole = json.loads(b"".join(trace_json(two_jobs_taking_turns(cycles=3).timeline())))
    traced: list[dict[str, Any]] = whole["traceEvents"]
    return traced


def test_every_span_is_a_slice_on_the_track_of_its_node() -> None:
    report = two_jobs_taking_turns(cycles=3)
    names = {e["tid"]: e["args"]["name"] for e in events() if e["name"] == "thread_name"}
    slices = [e for e in events() if e["ph"] == "X" and e["cat"] != "rental"]
    assert len(slices) == len(report.spans)
    for found, span in zip(slices, report.spans, strict=True):
        assert names[found["tid"]] == span.node
        assert found["ts"] == span.start_s * 1e6
        assert found["dur"] == (span.end_s - span.start_s) * 1e6
        assert found["name"].startswith(f"{span.job} {span.phase}")


def test_cost_is_a_counter_and_rented_time_a_slice_around_the_phases() -> None:
    counters = [e for e in events() if e["ph"] == "C"]
    assert [e["args"]["dollars"] for e in counters] == [57.04]
    assert sum(e["ph"] == "X" and e["name"] == "rented" for e in events()) == 2


def test_nodes_are_ordered_by_pool_and_number() -> None:
    names = ["train-2", "rollout-10", "rollout-9", "train-11"]
    ordered = sorted((NodeId(name) for name in names), key=node_order)
    assert ordered == ["rollout-9", "rollout-10", "train-2", "train-11"]
