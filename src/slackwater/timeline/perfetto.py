"""A run as Chrome trace events for Perfetto: a process per pool, a thread per node."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slackwater.model.ids import NodeId
from slackwater.timeline.lanes import KINDS, LaneTimeline
from slackwater.timeline.spans import Span, Timeline

_POOLS = ("rollout", "train")
_FLEET_PID = len(_POOLS) + 1
_MAX_WRITTEN = 200_000  # spans of lanes


def trace_json(timeline: Timeline) -> Iterator[bytes]:
    """The trace in pieces, so that a long run need not be held twice."""
    yield from _write_trace(_events(timeline), timeline.about)


def lanes_json(timeline: LaneTimeline, now_s: float) -> Iterator[bytes]:
    """A service's lanes as a trace, newest spans: a process per pool, a thread per device."""
    yield from _write_trace(_lane_events(timeline, now_s), {})


def _write_trace(events: Iterable[dict[str, Any]], about: Mapping[str, Any]) -> Iterator[bytes]:
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = b""
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":")).encode()
        separator = b",\n"
    yield b'\n],"otherData":' + json.dumps(dict(about)).encode() + b"}\n"


def _lane_events(timeline: LaneTimeline, now_s: float) -> Iterator[dict[str, Any]]:
    lanes = timeline.lanes()
    pids = {pool: pid for pid, pool in enumerate(dict.fromkeys(lane.pool for lane in lanes), 1)}
    for pool, pid in pids.items():
        yield _metadata_event(pid, 0, "process_name", pool)
    most = max(_MAX_WRITTEN // max(len(lanes), 1), 100)
    for tid, lane in enumerate(lanes, start=1):
        at = {"ph": "X", "pid": pids[lane.pool], "tid": tid}
        yield _metadata_event(pids[lane.pool], tid, "thread_name", lane.name)
        for since_s, until_s in lane.rented_s:
            ends_s = now_s if until_s is None else until_s
            when = {"ts": since_s * 1e6, "dur": (ends_s - since_s) * 1e6}
            yield {**at, "name": "rented", "cat": "rental", **when}
        for start_s, end_s, number, kind in timeline.spans(lane, now_s)[-most:]:
            job, what = timeline.jobs[number], KINDS[kind]
            phase = {"switch": "rollout,switch", "tail": "rollout,tail"}.get(what, f"{what},run")
            when = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
            yield {**at, "name": f"{job} {what}", "cat": phase, **when, "args": {"job": job}}


def _metadata_event(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    threads = _threads([rental.node for rental in timeline.rentals])
    yield from _names(threads)
    for rental in timeline.rentals:
        pid, tid = threads[rental.node]
        yield {
            "ph": "X",
            "name": "rented",
            "cat": "rental",
            "pid": pid,
            "tid": tid,
            "ts": rental.start_s * 1e6,
            "dur": (rental.end_s - rental.start_s) * 1e6,
        }
    for span in timeline.spans:
        yield _slice(span, *threads[span.node])
    for step in timeline.cost_steps:
        price = {"dollars": round(step.price_per_h, 4)}
        at = {"ph": "C", "name": "cost per hour", "pid": _FLEET_PID, "ts": step.at_s * 1e6}
        yield {**at, "args": price}


def _slice(span: Span, pid: int, tid: int) -> dict[str, Any]:
    what = span.phase.value if span.kind == "run" else f"{span.phase.value} ({span.kind})"
    return {
        "ph": "X",
        "name": f"{span.job} {what}",
        "cat": f"{span.phase.value},{span.kind}",
        "pid": pid,
        "tid": tid,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"job": span.job, **span.about},
    }


def node_order(node: NodeId) -> tuple[int, int, str]:
    """Rollout nodes before train nodes, each by number."""
    pool, _, number = node.rpartition("-")
    rank = _POOLS.index(pool) if pool in _POOLS else len(_POOLS)
    return rank, int(number) if number.isdigit() else 0, node


def _threads(nodes: Iterable[NodeId]) -> dict[NodeId, tuple[int, int]]:
    ordered = sorted(set(nodes), key=node_order)
    return {node: (node_order(node)[0] + 1, tid) for tid, node in enumerate(ordered, start=1)}


def _names(threads: dict[NodeId, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for rank, pool in enumerate(_POOLS, start=1):
        yield _metadata_event(rank, 0, "process_name", f"{pool} nodes")
    yield _metadata_event(_FLEET_PID, 0, "process_name", "fleet")
    for node, (pid, tid) in threads.items():
        yield _metadata_event(pid, tid, "thread_name", node)
